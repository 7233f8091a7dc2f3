"""Classes for ``isinstance`` checks; objects are prepared in place, so these classes only detect prepared ones."""

from __future__ import annotations

from typing import Any, ClassVar

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from accel_nb.accelerator.prepare.preparer import is_prepared
from accel_nb.errors import MisuseError


class _DetectsPrepared(type):
    """Metaclass whose ``isinstance`` is true for prepared objects of the class ``kind``."""

    kind: type

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.kind) and is_prepared(instance)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise MisuseError(
            f"{cls.__name__} is not built here: Accelerator.prepare prepares a {cls.kind.__name__} in "
            "place, and it keeps its class"
        )


class AcceleratedOptimizer(metaclass=_DetectsPrepared):
    """The class of prepared optimizers, for ``isinstance`` only."""

    kind: ClassVar[type] = Optimizer


class AcceleratedScheduler(metaclass=_DetectsPrepared):
    """The class of prepared schedulers, for ``isinstance`` only."""

    kind: ClassVar[type] = LRScheduler
