"""Snapshot of a model's state: its buffers, its parameters as objects, and the attributes of its modules."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

_CONTAINERS = (list, dict, set)


class ModuleSnapshot:
    """A snapshot of the attributes and buffers of a model and its submodules, to undo changes by a forward pass.

    Parameters that the code of the model replaces by others are restored too, unless ``shards_params``: then the
    strategy replaces parameters in a forward pass, and restores them itself. For changes of their values see
    `ParameterWrites`.
    """

    def __init__(self, model: nn.Module, *, shards_params: bool) -> None:
        excluded = ("_modules", "_parameters") if shards_params else ("_modules",)
        self._parts = [(name, part) for name, part in model.named_modules()]
        self._attributes = [dict(vars(part)) for _, part in self._parts]
        self._contents = [
            {
                key: copy.copy(value)
                for key, value in vars(part).items()
                if isinstance(value, _CONTAINERS) and key not in excluded
            }
            for _, part in self._parts
        ]
        self._buffers = [
            (value, value.detach().clone())
            for _, part in self._parts
            for value in part._buffers.values()
            if value is not None and value.layout is torch.strided and not value.is_meta
        ]

    @torch.no_grad()
    def restore(self) -> dict[str, Any]:
        """Restore all attributes and buffers; return the changed values, by name."""
        changed: dict[str, Any] = {}
        for number, (value, before) in enumerate(self._buffers):
            if not torch.equal(value, before):
                changed[f"buffer {number}"] = value.detach().clone()
                value.data.copy_(before)  # keeps the version counter: an earlier call may have saved the buffer
        for (name, part), attributes, contents in zip(self._parts, self._attributes, self._contents, strict=True):
            now = vars(part)
            for key, value in list(now.items()):
                if key in contents and attributes[key] is value:
                    if not _is_same(value, contents[key]):
                        changed[f"{name}.{key}"] = _copied(value)
                elif key not in attributes or attributes[key] is not value:
                    changed[f"{name}.{key}"] = _copied(value)
            for key, content in contents.items():
                _refill(attributes[key], content)
            for key in [key for key in now if key not in attributes]:
                del now[key]
            now.update(attributes)
        return changed


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, _CONTAINERS) else value


def _is_same(value: Any, content: Any) -> bool:
    """Whether a container holds the same objects as its earlier copy."""
    if len(value) != len(content):
        return False
    if isinstance(value, dict):
        return all(key in content and item is content[key] for key, item in value.items())
    if isinstance(value, set):
        return value == content
    return all(one is other for one, other in zip(value, content, strict=True))


def _refill(container: Any, content: Any) -> None:
    """Set the items of a container to those of its earlier copy."""
    if _is_same(container, content):
        return
    container.clear()
    if isinstance(container, list):
        container.extend(content)
    else:
        container.update(content)
