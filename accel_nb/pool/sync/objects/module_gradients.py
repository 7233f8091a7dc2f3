"""Gradients of models: parts of a model that are sent beside its weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from accel_nb.config.byte_sizes import size_text
from accel_nb.pool.sync.objects.object_kinds import is_sparse
from accel_nb.pool.sync.objects.shared_memory import OwnData, data_of
from accel_nb.runtime.distributed.held_gradients import gradient_of, is_held, set_gradient
from accel_nb.runtime.distributed.sharded import can_read_full, full_shape, is_sharded
from accel_nb.runtime.distributed.sharded import copy_into as fill_tensor
from accel_nb.runtime.leaf_tensors import is_leaf


def gradients_of(tensors: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return by path the gradients of the tensors that have one, such as the ``named_parameters`` of a module."""
    found = ((path, gradient_of(value)) for path, value in tensors if is_leaf(value))
    return {path: gradient for path, gradient in found if gradient is not None}


def gradient_state(module: Any) -> dict[str, Any]:
    """Return the gradients of a module, for `set_gradients` of another copy of it."""
    return {path: OwnData(value) for path, value in gradients_of(module.named_parameters()).items()}


def set_gradients(module: Any, state: Mapping[str, Any]) -> None:
    """Set each parameter's gradient to the one in ``state``, or to None if ``state`` has none."""
    import torch

    for path, parameter in module.named_parameters():
        value = data_of(state.get(path))
        if value is None or is_sparse(value):
            set_gradient(parameter, value)
        elif value.shape == full_shape(parameter):
            if is_held(parameter):
                gradient = value.to(parameter.device, copy=True)
            else:
                gradient = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
                fill_tensor(gradient, value)
            set_gradient(parameter, gradient)


@dataclass(slots=True)
class ReturnedGradients:
    """The gradients that go back to the notebook: those of a model if they are not large."""

    limit: int
    """The bytes above which the gradients of a model are large."""
    partial: Set[int]
    """The ids of the parameters whose gradients are not those of one process."""
    not_returned: dict[str, str]
    """By path, why a value stays on the workers."""
    _left: set[int] = field(default_factory=set[int])
    """The ids of the parameters whose gradients stay on the workers because of their size."""

    def includes(self, path: str, module: Any, *, is_wanted: bool = False) -> bool:
        """Return whether the gradients of the module at a path go back; wanted ones do whatever their size."""
        if any(id(parameter) in self.partial for parameter in module.parameters()):
            return False
        found = gradients_of(module.named_parameters())
        size = sum(math.prod(full_shape(value)) * value.element_size() for value in found.values())
        is_sharded_module = any(is_sharded(value) for value in found.values()) and not can_read_full()
        if not is_sharded_module and (is_wanted or size <= self.limit):
            return True
        self._left.update(map(id, module.parameters()))
        self.not_returned[f"{path}.grad"] = f"{size_text(size)} is {'sharded' if is_sharded_module else 'large'}"
        return False

    def includes_gradient_of(self, parameter: Any) -> bool:
        """Return whether a parameter that goes back has its gradient."""
        return id(parameter) not in self.partial and id(parameter) not in self._left
