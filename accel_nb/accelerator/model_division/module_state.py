"""Snapshot of all that a model's forward pass may change: attributes and buffers of modules, and other objects."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from accel_nb.accelerator.model_division.random_generators import has_state, is_generator, set_state, state_of
from accel_nb.accelerator.model_division.reachable_state import (
    CONTAINERS,
    PLAIN_TYPES,
    Reachable,
    find_reachable,
    has_values,
)
from accel_nb.runtime.process.user_code import is_user_module

_REPLACED_BY_SHARDING = ("_modules", "_parameters")
_MAX_BYTES = 256 * 2**20
"""Maximum number of bytes of tensors and arrays outside of modules that are copied."""


@dataclass(frozen=True)
class Changes:
    """Values that a forward pass has changed, by name."""

    values: dict[str, Any]
    user_names: tuple[str, ...] = ()
    """The names of changed values that belong to the user's code."""
    generators: tuple[str, ...] = ()
    """The names of the generators of Python and NumPy that the forward pass drew from."""


class ModuleSnapshot:
    """A snapshot of the attributes and buffers of a model, its submodules and parameters, to undo a forward pass.

    It includes containers, the user's objects, classes and functions, variables, generators, tensors and arrays that
    the code of the model uses; tensors and arrays only up to `_MAX_BYTES`. Parameters that this code replaces by others
    are restored too, unless ``shards_params``: then the strategy replaces parameters in a forward pass, and restores
    them itself. For changes of their values see `TensorWrites`.

    Attributes:
        uncopied: the tensors outside of modules that were too large to copy, by name.
    """

    def __init__(self, model: nn.Module, *, shards_params: bool) -> None:
        parts = [(name, part, is_user_module(type(part).__module__)) for name, part in model.named_modules()]
        held = [Reachable(name, vars(part), is_user_code) for name, part, is_user_code in parts]
        held += [
            Reachable(f"{name}.{key}".lstrip("."), value, is_user_code)
            for name, part, is_user_code in parts
            for key, value in vars(part).items()
            if isinstance(value, CONTAINERS) and not (shards_params and key in _REPLACED_BY_SHARDING)
        ]
        if not shards_params:  # hooks of opacus count the calls at the parameters
            held += [
                Reachable(f"{name}.{key}".lstrip("."), vars(parameter), True)
                for name, part, _ in parts
                for key, parameter in part._parameters.items()
                if parameter is not None
            ]
        # In a block of `parametrize.cached` a weight is computed once, with the graph of another call.
        held.append(Reachable("parametrized weights", parametrize._cache, False))
        reachable = list(find_reachable(model))
        held += [found for found in reachable if not has_values(found.value) and not is_generator(found.value)]
        self._held = {id(found.value): (found, copy.copy(found.value)) for found in held}
        self._generators = [(found, state_of(found.value)) for found in reachable if is_generator(found.value)]
        self._values = [
            (Reachable(f"{name}.{key}".lstrip("."), value, is_user_code), value.detach().clone())
            for name, part, is_user_code in parts
            for key, value in part._buffers.items()
            if value is not None and value.layout is torch.strided and not (value.is_meta or value.is_nested)
        ]
        self.uncopied: list[tuple[str, Tensor]] = []
        num_bytes = 0
        for found in reachable:
            if not has_values(found.value):
                continue
            if num_bytes + found.value.nbytes <= _MAX_BYTES:
                num_bytes += found.value.nbytes
                self._values.append((found, _copied(found.value)))
            elif isinstance(found.value, Tensor):
                self.uncopied.append((found.name, found.value))

    def changes(self) -> Changes:
        """Return the values that have changed since the snapshot."""
        values: dict[str, Any] = {}
        user_names: list[str] = []
        drawn: list[str] = []
        for (name, value, is_user_code), before in self._values:
            if not _has_equal_values(value, before):
                values[name] = _copied(value)
                user_names += [name] if is_user_code else []
        for (name, generator, _), state in self._generators:
            if not has_state(generator, state):
                values[f"generator {name}"] = state_of(generator)
                drawn += [] if isinstance(generator, torch.Generator) else [name]
        for (name, container, is_user_code), content in self._held.values():
            for key, value in _changed_items(name, container, content):
                values[key] = _copied(value)
                user_names += [key] if is_user_code else []
        return Changes(values, tuple(user_names), tuple(drawn))

    @torch.no_grad()
    def restore(self) -> Changes:
        """Restore all attributes, containers, buffers and generators; return the values that had changed."""
        changes = self.changes()
        for (_, value, _), before in self._values:
            if not _has_equal_values(value, before):
                if isinstance(value, Tensor):
                    # `data` keeps the version counter: an earlier call may have saved the buffer.
                    if value.dtype != before.dtype:
                        value.data = before.clone()
                    elif value.shape != before.shape:
                        value.resize_(before.shape)
                    value.data.copy_(before)
                else:
                    value[...] = before
        for (_, generator, _), state in self._generators:
            if not has_state(generator, state):
                set_state(generator, state)
        for (_, container, _), content in self._held.values():
            if not _is_same(container, content):
                _refill(container, content)
        return changes


def _changed_items(name: str, container: Any, content: Any) -> Iterator[tuple[str, Any]]:
    """Yield the items of a container that differ from its earlier copy, each with a name."""
    if _is_same(container, content):
        return
    if not isinstance(container, Mapping):
        yield name, container
        return
    for key in container:
        if key not in content or not _is_unchanged(container[key], content[key]):
            yield f"{name}.{key}".lstrip("."), container[key]


def _is_unchanged(value: Any, before: Any) -> bool:
    if value is before:
        return True
    if isinstance(value, (*PLAIN_TYPES, torch.device, torch.dtype, torch.Size)):
        return type(value) is type(before) and bool(value == before)
    return has_values(value) and type(value) is type(before) and _has_equal_values(value, before)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if has_values(value):
        return value.copy()
    return copy.copy(value) if isinstance(value, CONTAINERS) else value


def _has_equal_values(value: Any, before: Any) -> bool:
    """Return whether a tensor or an array has the bits of its earlier copy, or values that compare as equal."""
    if isinstance(value, Tensor):
        if value.shape != before.shape or value.dtype != before.dtype:
            return False
        return torch.equal(value, before) or torch.equal(_bytes_of(value), _bytes_of(before))
    return value.shape == before.shape and value.tobytes() == before.tobytes()


def _bytes_of(value: Tensor) -> Tensor:
    return value.detach().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)


def _is_same(value: Any, content: Any) -> bool:
    """Return whether a container holds the same objects as its earlier copy."""
    if len(value) != len(content):
        return False
    if isinstance(value, Mapping):  # caches drop their first item
        pairs = zip(value.items(), content.items(), strict=True)
        return all(key == other and item is before for (key, item), (other, before) in pairs)
    if isinstance(value, set):
        return value == content
    return all(one is other for one, other in zip(value, content, strict=True))


def _refill(container: Any, content: Any) -> None:
    """Set the items of a container to the items of its earlier copy."""
    if isinstance(container, list | deque):
        container.clear()
        container.extend(content)
        return
    if isinstance(container, set):
        container.clear()
        container.update(content)
        return
    if list(container) != list(content):
        container.clear()
    for key, value in content.items():  # the `update` of a Counter adds
        if key not in container or container[key] is not value:
            container[key] = value
