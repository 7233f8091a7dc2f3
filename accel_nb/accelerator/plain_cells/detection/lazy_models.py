"""Models with lazy layers, which are prepared after their first call: only then do they have parameters."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from accel_nb.accelerator.core import Accelerator
from accel_nb.accelerator.plain_cells.cell_warnings import warn_lazy_model
from accel_nb.accelerator.plain_cells.detection.distributed_objects import has_any_parameter


class LazyModels:
    """Leaves models with lazy layers out of the preparation until the statement that calls them has ended.

    Between the first call and its backward pass a model cannot be prepared: that moves its parameters.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._reported: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._left_out: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def begin_statement(self) -> None:
        """Record that no call of a model waits for its backward pass."""
        self._left_out.clear()

    def exclude_lazy(self, objects: Iterable[Any]) -> list[Any]:
        """Return ``objects`` without models that have uninitialized lazy layers, and without their optimizers."""
        listed = list(objects)
        models = [item for item in listed if isinstance(item, nn.Module)]
        lazy = [model for model in models if model in self._left_out or _has_lazy_tensors(model)]
        if not lazy:
            return listed
        self._left_out.update(lazy)
        owned = {id(value) for model in lazy for value in model.parameters()}
        optimizers = [item for item in listed if not isinstance(item, nn.Module) and has_any_parameter(item, owned)]
        if optimizers and any(model not in self._reported for model in lazy):
            self._reported.update(lazy)
            warn_lazy_model(self._accelerator, type(lazy[0]).__name__)
        left_out = {id(item) for item in [*lazy, *optimizers]}
        return [item for item in listed if id(item) not in left_out]


def _has_lazy_tensors(model: nn.Module) -> bool:
    # Not by `model.parameters()`, which frees the gathered parameters of a sharded model.
    lazy: list[Any] = [part for part in model.modules() if isinstance(part, LazyModuleMixin)]
    return any(part.has_uninitialized_params() for part in lazy)
