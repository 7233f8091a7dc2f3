"""Ids of shared objects, which are sent as references.

An object is *shared* if kernel and workers each have a copy of it, and the copies have the same id.
"""

from __future__ import annotations

import datetime
import decimal
import fractions
import pathlib
import re
import types
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from accel_nb.pool.sync.objects.module_hooks import FLAGS, HOOKS
from accel_nb.pool.sync.objects.object_kinds import (
    is_array_scalar,
    is_device,
    is_module,
    is_optimizer,
    is_plain_array,
    is_tensor,
    parameters_of,
)
from accel_nb.pool.sync.objects.shared_memory import MemorySpan, SharedMemory, layout_of, span_of
from accel_nb.pool.sync.objects.user_hooks import GRADIENT_HOOKS, OPTIMIZER_HOOKS
from accel_nb.runtime.distributed.sharded import copies, former_ids, full_shape

SharedId = tuple[str, str, str]
"""The id of a shared object: (kind, path from a name, path below it in a module or attribute)."""


IMPORTED = "imported"
"""The kind of the id of an object that is an attribute of a module which kernel and workers import."""

ITEM = "item"
"""The kind of the id of an item of a long container: the path of the container, then as ``3/200`` the item's number."""

OUTDATED: SharedId = ("outdated", "", "")
"""The id of an iterator of the notebook that workers have read from: it is referred to, and never sent again."""

StatePart = tuple[str, str, tuple[int, ...]]
"""A tensor in the state of an optimizer: its place, as ``0:exp_avg``, its dtype and its shape."""

_OWN_CONTAINERS = ("param_groups", "state", "defaults")
"""The attributes of an optimizer that `copy.copy` of it has too."""


@dataclass(frozen=True, slots=True)
class OptimizerParts:
    """The parts of an optimizer that kernel and workers share."""

    groups: int = 0
    """How many groups: each is changed in place, whichever dict it is here."""
    tensors: Mapping[StatePart, int] = field(default_factory=dict[StatePart, int])
    """The ids of the tensors in the state."""

    def has(self, part: StatePart, tensor: Any) -> bool:
        """Return whether a tensor is the part of the state, or its sharded or restored replacement."""
        known = self.tensors.get(part)
        return known is not None and (known == id(tensor) or known in former_ids(tensor))


ObjectId = tuple[Literal["id"], Any]
"""The `id` of an object: that of a `SharedId`, or of an object in the stream."""


class SharedObjects(dict[int, SharedId]):
    """The ids of shared objects. Of these, ``owners`` are tensors and arrays that others may be views of.

    It is valid until one of the objects changes.
    """

    def __init__(self, ids: Mapping[int, SharedId] | None = None, owners: Iterable[Any] = ()) -> None:
        super().__init__(ids or {})
        self.owners = {id(owner): owner for owner in owners}

    @cached_property
    def memory(self) -> SharedMemory:
        """The memory of the owners; of a parameter and a tensor in the same memory, the tensor is the view."""
        parts = [key for key in self.owners if key in self and self[key][0] in ("parameter", "buffer")]
        return SharedMemory(self.owners[key] for key in dict.fromkeys([*parts, *self.owners]))

    def find_owner(self, span: MemorySpan) -> tuple[Any, int] | None:
        """Return the object whose memory contains a span, and the offset there in bytes; None if there is none."""
        found = self.memory.find(span)
        return None if found is None or self.get(id(found[0])) is None else found

    def select(self, keep: Callable[[SharedId], bool]) -> SharedObjects:
        """Return the objects whose id is to be kept."""
        kept = {key: item for key, item in self.items() if keep(item)}
        return SharedObjects(kept, [owner for key, owner in self.owners.items() if key in kept])

    def merge(self, other: SharedObjects) -> SharedObjects:
        """Return these objects and those of ``other``, whose ids take precedence."""
        return SharedObjects({**self, **other}, [*self.owners.values(), *other.owners.values()])

    def view_of(self, value: Any) -> tuple[Any, ...] | None:
        """Return, for a tensor or array in the memory of a shared object, the id of that object and the place in it.

        A tensor in the state of an optimizer is one too: its content is that of the optimizer.
        """
        span = span_of(value)
        found = None if span is None else self.find_owner(span)
        if found is None or (found[0] is value and self[id(value)][0] != "state"):
            return None
        layout = layout_of(value) if is_tensor(value) else (str(value.dtype), value.shape, value.strides)
        return id(found[0]), found[1], layout

    def has_moved(self, kind: Any, value: Any) -> bool:
        """Return whether the object that a value was a view of is on another device now.

        ``kind`` is the ``kind`` of the value's earlier fingerprint.
        """
        owner: Any = self.owners.get(kind[1][0]) if type(kind) is tuple and kind[:1] == ("view",) else None
        if not is_tensor(owner):
            return False
        return owner.device != value.device if is_tensor(value) else not owner.is_cpu


def shared_ids(objects: Mapping[str, Any], held: Mapping[str, OptimizerParts] | None = None) -> SharedObjects:
    """Return ids for ``objects`` (by name) and their parts.

    These are the submodules, parameters and buffers of modules, the dicts that hold these and hooks, and the groups of
    optimizers and the tensors in their states: of an optimizer in ``held`` only those that the receiver holds too.
    """
    ids: dict[int, SharedId] = {}
    owners: list[Any] = []
    for name, value in objects.items():
        if not has_identity(value):
            continue
        ids.setdefault(id(value), ("name", name, ""))
        if is_tensor(value) or is_plain_array(value):
            owners.append(value)
        if is_module(value):
            owners += _add_parts(ids, name, value)
        elif is_optimizer(value):
            for attribute in (*OPTIMIZER_HOOKS, *_OWN_CONTAINERS):
                if attribute in vars(value):
                    ids.setdefault(id(vars(value)[attribute]), ("attribute", name, attribute))
            parts = None if held is None else held.get(name)
            for number, group in enumerate(value.param_groups[: None if parts is None else parts.groups]):
                ids.setdefault(id(group), ("group", name, str(number)))
            for part, tensor in state_parts(value).items():
                is_held = parts is None or parts.has(part, tensor)
                if is_held and ids.get(id(tensor), ("name",))[0] == "name":  # a tensor in the state that has a name too
                    ids[id(tensor)] = "state", name, part[0]
                    owners.append(tensor)
    return _with_copies(SharedObjects(ids, owners))


def _with_copies(objects: SharedObjects) -> SharedObjects:
    """Return the objects and the full copies of sharded tensors; a copy has the id of its sharded tensor."""
    held = copies()
    if held is None:
        return objects
    found = SharedObjects(objects, objects.owners.values())
    for whole, target in held.used():
        span = span_of(target)
        owner, offset = (None, 0) if span is None else objects.find_owner(span) or (None, 0)
        if owner is not None and offset == 0 and full_shape(owner) == full_shape(target):
            found[id(whole)], found.owners[id(whole)] = objects[id(owner)], whole
    return found


def optimizer_parts(optimizer: Any) -> OptimizerParts:
    """Return the parts of an optimizer, as they are now."""
    tensors = {part: id(tensor) for part, tensor in state_parts(optimizer).items()}
    return OptimizerParts(len(optimizer.param_groups), tensors)


def state_parts(optimizer: Any) -> dict[StatePart, Any]:
    """Return the tensors in the state of an optimizer's parameters, with their full shapes."""
    found: dict[StatePart, Any] = {}
    for number, parameter in enumerate(parameters_of(optimizer)):
        state = optimizer.state.get(parameter)
        for key, value in state.items() if isinstance(state, Mapping) else ():
            if is_tensor(value):
                found[f"{number}:{key}", str(value.dtype), tuple(full_shape(value))] = value
    return found


def resolve_state_part(optimizer: Any, place: str) -> Any:
    """Return the tensor at a place in the state of an optimizer; raise LookupError if there is none."""
    number, _, key = place.partition(":")
    state = optimizer.state.get(parameters_of(optimizer)[int(number)]) or {}
    return next(value for name, value in state.items() if str(name) == key)


_REGISTRIES = ("_modules", "_parameters", "_buffers")


def _add_parts(ids: dict[int, SharedId], name: str, module: Any) -> Iterator[Any]:
    """Add the ids of a module's parts, in one walk, since cells wait for it; yield the parameters and buffers."""
    for path, part in module.named_modules():
        ids.setdefault(id(part), ("module", name, path))
        own, prefix = vars(part), f"{path}." if path else ""
        for attribute in HOOKS:
            if held := own.get(attribute):
                ids.setdefault(id(held), ("hooks", name, f"{path}:{attribute}"))
        for attribute, hooks in FLAGS.items():
            # The handle of a hook refers to the dicts of flags too, which may be empty.
            if (held := own.get(attribute)) or own.get(hooks):
                ids.setdefault(id(held), ("hooks", name, f"{path}:{attribute}"))
        for attribute in _REGISTRIES:  # a `copy.copy` of a module shares these dicts
            if isinstance(held := own.get(attribute), dict) and held:
                ids.setdefault(id(held), ("registry", name, f"{path}:{attribute}"))
        for key, value in part._parameters.items():
            if value is None:
                continue
            ids.setdefault(id(value), ("parameter", name, prefix + key))
            yield value
            for attribute in GRADIENT_HOOKS:
                if value.is_leaf and (held := getattr(value, attribute)):
                    ids.setdefault(id(held), ("gradient hooks", name, f"{prefix}{key}:{attribute}"))
        for key, value in part._buffers.items():
            if value is not None:
                ids.setdefault(id(value), ("buffer", name, prefix + key))
                yield value


_VALUES = (
    *(int, float, complex, decimal.Decimal, fractions.Fraction),
    *(str, bytes, re.Pattern, pathlib.PurePath, uuid.UUID),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo),
    *(tuple, frozenset, range, slice, types.ModuleType, type(None)),
)
_COMMON = frozenset({int, float, str, bool, type(None), bytes})
"""Types without identity that most items of long containers have; a look-up here is faster than `isinstance`."""


def has_identity(value: Any) -> bool:
    """Return whether the identity of a value matters: it does not for numbers, strings, tuples, paths or dates.

    Nothing changes these in place. Importable functions, classes and modules are the same in both processes anyway.
    """
    if type(value) in _COMMON:
        return False
    if isinstance(value, type | types.FunctionType):
        return value.__module__ == "__main__"
    return not (isinstance(value, _VALUES) or is_device(value) or is_array_scalar(value))
