"""Classes that scripts ask ``isinstance`` of; objects are prepared in place, so these only tell what is prepared."""

from __future__ import annotations

from typing import Any, ClassVar

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from accel_nb.accelerator.prepare.preparer import is_prepared
from accel_nb.errors import MisuseError


class _OfPrepared(type):
    """Makes ``isinstance`` ask whether an object of the right kind is prepared."""

    kind: type

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.kind) and is_prepared(instance)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise MisuseError(
            f"{cls.__name__} is not built here: Accelerator.prepare prepares a {cls.kind.__name__} in "
            "place, and it keeps its class"
        )


class AcceleratedOptimizer(metaclass=_OfPrepared):
    """What prepared optimizers are instances of."""

    kind: ClassVar[type] = Optimizer


class AcceleratedScheduler(metaclass=_OfPrepared):
    """What prepared schedulers are instances of."""

    kind: ClassVar[type] = LRScheduler


class DataLoaderShard(metaclass=_OfPrepared):
    """What prepared loaders are instances of."""

    kind: ClassVar[type] = DataLoader


class DataLoaderDispatcher(metaclass=_OfPrepared):
    """What prepared loaders are instances of as well: how one is read depends on options, not on its class."""

    kind: ClassVar[type] = DataLoader
