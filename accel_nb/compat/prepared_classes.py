"""Classes of prepared objects: for ``isinstance``, and for the members that accelerate's wrappers have.

Objects are prepared in place. They get these members through a subclass created for the object, which keeps members of
its own that have such a name.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, ClassVar

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from accel_nb.accelerator.prepare.preparer import is_prepared
from accel_nb.compat.states import GradientState
from accel_nb.errors import MisuseError
from accel_nb.runtime.tensors.instance_patching import innermost_class, patch_instance, plain_class

if TYPE_CHECKING:
    from accel_nb.compat.accelerator import Accelerator

LOADER_EVENTS = ("begin", "end", "reset")
"""Methods of accelerate's loaders around an iteration; a prepared loader records its iteration itself."""

_ACCELERATOR = "_accel_nb_accelerator"


class _PreparedMeta(type):
    """Metaclass of classes for ``isinstance``, which is true for prepared objects of the class ``kind``."""

    kind: type

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.kind) and is_prepared(instance)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise MisuseError(
            f"{cls.__name__} is not built here: Accelerator.prepare prepares a {cls.kind.__name__} in "
            "place, and isinstance works as before"
        )


class AcceleratedOptimizer(metaclass=_PreparedMeta):
    """The class of prepared optimizers, for ``isinstance``, with the members that they get."""

    kind: ClassVar[type] = Optimizer

    @property
    def optimizer(self) -> Any:
        """The optimizer itself, which has no wrapper."""
        return self

    @property
    def scaler(self) -> Any:
        """The `GradScaler` under fp16, else None."""
        accelerator = _accelerator_of(self)
        return None if accelerator is None else accelerator.scaler

    @property
    def step_was_skipped(self) -> bool:
        """Whether the latest step was skipped because gradients overflowed."""
        accelerator = _accelerator_of(self)
        return accelerator is not None and accelerator.was_step_skipped(self)

    @property
    def gradient_state(self) -> GradientState:
        """The shared state of gradient accumulation."""
        return GradientState()

    def train(self) -> None:
        """Do nothing: this optimizer has no mode of training."""

    def eval(self) -> None:
        """Do nothing: this optimizer has no mode of evaluation."""


class AcceleratedScheduler(metaclass=_PreparedMeta):
    """The class of prepared schedulers, for ``isinstance``, with the members that they get."""

    kind: ClassVar[type] = LRScheduler
    optimizer: Optimizer

    @property
    def scheduler(self) -> Any:
        """The scheduler itself, which has no wrapper."""
        return self

    @property
    def optimizers(self) -> list[Optimizer]:
        """The scheduler's optimizer."""
        return [self.optimizer]

    @property
    def split_batches(self) -> bool:
        """Whether each batch of a loader is divided among the processes."""
        accelerator = _accelerator_of(self)
        return accelerator is not None and accelerator.split_batches

    @property
    def step_with_optimizer(self) -> bool:
        """Whether a call of ``step`` has an effect only where the optimizer steps."""
        accelerator = _accelerator_of(self)
        return accelerator is None or accelerator.step_scheduler_with_optimizer

    @property
    def gradient_state(self) -> GradientState:
        """The shared state of gradient accumulation."""
        return GradientState()


def do_nothing() -> None:
    """Do nothing."""


def add_members(item: Any, source: type, accelerator: Accelerator, methods: dict[str, Any] | None = None) -> None:
    """Add to a prepared object the public members of ``source`` that it lacks; ``methods`` replace its own."""
    kind: Any = innermost_class(item)
    body = {
        name: value
        for name, value in vars(source).items()
        if not name.startswith("_") and name != "kind" and not hasattr(kind, name) and name not in vars(item)
    }
    if methods or _ACCELERATOR not in vars(type(item)):
        patch_instance(item, body | (methods or {}), plain_class(item))
    setattr(type(item), _ACCELERATOR, weakref.ref(accelerator))


def _accelerator_of(item: Any) -> Accelerator | None:
    return getattr(type(item), _ACCELERATOR)()
