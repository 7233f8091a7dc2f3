"""Snapshot of what a model's forward pass may change: attributes and buffers of its modules, and other objects."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from accel_nb.accelerator.model_division.reachable_state import CONTAINERS, IsUserModule, find_reachable, has_values

_OF_SHARDED = ("_modules", "_parameters")
_MAX_BYTES = 256 * 2**20
"""The bytes of tensors and arrays outside of modules that are copied at most."""


class ModuleSnapshot:
    """A snapshot of the attributes and buffers of a model and its submodules, to undo changes by a forward pass.

    It includes containers, the user's objects, global variables, tensors and arrays that the code of the model uses; of
    tensors and arrays as many as `_MAX_BYTES` hold. Parameters that this code replaces by others are restored too,
    unless ``shards_params``: then the strategy replaces parameters in a forward pass, and restores them itself. For
    changes of their values see `TensorWrites`.

    Attributes:
        uncopied: the tensors outside of modules that were too large to copy, by name.
    """

    def __init__(self, model: nn.Module, *, shards_params: bool, is_user_module: IsUserModule) -> None:
        parts = list(model.named_modules())
        held: list[tuple[str, Any]] = [(name, vars(part)) for name, part in parts]
        held += [
            (f"{name}.{key}", value)
            for name, part in parts
            for key, value in vars(part).items()
            if isinstance(value, CONTAINERS) and not (shards_params and key in _OF_SHARDED)
        ]
        reachable = list(find_reachable(model, is_user_module))
        held += [(name, value) for name, value in reachable if not has_values(value)]
        self._held = {id(container): (name, container, copy.copy(container)) for name, container in held}
        self._buffers = [
            (value, value.detach().clone())
            for _, part in parts
            for value in part._buffers.values()
            if value is not None and value.layout is torch.strided and not value.is_meta
        ]
        self._values: list[tuple[str, Any, Any]] = []
        self.uncopied: list[tuple[str, Tensor]] = []
        num_bytes = 0
        for name, value in reachable:
            if not has_values(value):
                continue
            if num_bytes + value.nbytes <= _MAX_BYTES:
                num_bytes += value.nbytes
                self._values.append((name, value, _copied(value)))
            elif isinstance(value, Tensor):
                self.uncopied.append((name, value))

    @torch.no_grad()
    def restore(self) -> dict[str, Any]:
        """Restore all attributes, containers and buffers; return the changed values, by name."""
        changed: dict[str, Any] = {}
        for number, (value, before) in enumerate(self._buffers):
            if not torch.equal(value, before):
                changed[f"buffer {number}"] = value.detach().clone()
                value.data.copy_(before)  # keeps the version counter: an earlier call may have saved the buffer
        for name, value, before in self._values:
            if not _has_equal_values(value, before):
                changed[name] = _copied(value)
                if isinstance(value, Tensor):
                    value.data.copy_(before)
                else:
                    value[...] = before
        for name, container, content in self._held.values():
            if _is_same(container, content):
                continue
            if isinstance(container, Mapping):
                for key in container:
                    if key not in content or container[key] is not content[key]:
                        changed[f"{name}.{key}"] = _copied(container[key])
            else:
                changed[name] = _copied(container)
            _refill(container, content)
        return changed


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if has_values(value):
        return value.copy()
    return copy.copy(value) if isinstance(value, CONTAINERS) else value


def _has_equal_values(value: Any, before: Any) -> bool:
    """Whether a tensor or an array has the values of its earlier copy; NaN equals NaN."""
    if isinstance(value, Tensor):
        is_equal = torch.equal(value, before)
        return is_equal or (value.is_floating_point() and torch.equal(value.nan_to_num(), before.nan_to_num()))
    return value.tobytes() == before.tobytes()


def _is_same(value: Any, content: Any) -> bool:
    """Whether a container holds the same objects as its earlier copy."""
    if len(value) != len(content):
        return False
    if isinstance(value, Mapping):
        return all(key in content and item is content[key] for key, item in value.items())
    if isinstance(value, set):
        return value == content
    return all(one is other for one, other in zip(value, content, strict=True))


def _refill(container: Any, content: Any) -> None:
    """Set the items of a container to those of its earlier copy."""
    if isinstance(container, list | deque):
        container.clear()
        container.extend(content)
        return
    if isinstance(container, set):
        container.clear()
    else:
        for key in [key for key in container if key not in content]:
            del container[key]
    container.update(content)
