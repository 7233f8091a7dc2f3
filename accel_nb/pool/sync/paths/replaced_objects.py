"""Objects that a cell on the workers has replaced: the notebook.s containers get the new object in place of the old.

Python cannot replace an object in the whole process. Other references to the old one, as in a tuple, are reported.
"""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from accel_nb.pool.sync.objects.class_attributes import is_notebook_class
from accel_nb.pool.sync.objects.object_kinds import attributes_of, is_module, set_attributes
from accel_nb.pool.sync.paths.object_paths import referenced_objects

_OWN_REFERENCES = 2
"""References by the dict of old objects, and by of the argument of `sys.getrefcount`."""


def replace_references(old: Mapping[str, Any], values: Mapping[str, Any], namespace: dict[str, Any]) -> list[str]:
    """Replace references to ``old`` objects, by name, by the name's present value; return other names of these objects.

    ``values`` are the values of the notebook in which references are replaced; names are bound in ``namespace``.
    """
    rebound: list[str] = []
    new = {id(value): namespace[name] for name, value in old.items()}
    for name in list(values):
        value = values[name]
        if id(value) in new:
            namespace[name] = new[id(value)]
            rebound.append(name)
            continue
        parts = value.modules() if is_module(value) else (value,)
        for holder in (*parts, *referenced_objects(name, value).values()):
            _replace_in(holder, new)
    return rebound


def describe_other_uses(old: dict[str, Any]) -> dict[str, str]:
    """Empty ``old``, and return by name a line for each object in it that is still referred to elsewhere."""
    kinds = {name: type(value).__name__ for name, value in old.items()}
    weak = {name: weakref.ref(value) for name, value in old.items() if type(value).__weakrefoffset__}
    for name in weak:  # old ones may refer to each other
        del old[name]
    if _find_used(weak, old):
        gc.collect()  # objects that refer to the old ones may be garbage
    used = _find_used(weak, old)
    old.clear()
    return {
        name: f"{name} is a new object, since a {kinds[name]} cannot be changed in place; other "
        "variables that refer to it still have the earlier object"
        for name in kinds
        if name in used
    }


def _find_used(weak: Mapping[str, weakref.ref[Any]], old: Mapping[str, Any]) -> set[str]:
    alive = {name for name, reference in weak.items() if reference() is not None}
    return alive.union(name for name in old if sys.getrefcount(old[name]) > _OWN_REFERENCES)


def _replace_in(holder: Any, new: Mapping[int, Any]) -> None:
    """Replace references that a container, a closure cell, a class or an object has directly."""
    if isinstance(holder, list | deque):
        for index in _keys_to_replace(enumerate(holder), new):
            holder[index] = new[id(holder[index])]
    elif isinstance(holder, dict):
        for key in _keys_to_replace(holder.items(), new):
            dict.__setitem__(holder, key, new[id(holder[key])])
    elif isinstance(holder, types.CellType):
        with suppress(ValueError):  # the cell is empty
            holder.cell_contents = new.get(id(holder.cell_contents), holder.cell_contents)
    own = attributes_of(holder) or {}
    for name in _keys_to_replace(own.items(), new):
        if is_notebook_class(holder):
            setattr(holder, name, new[id(own[name])])
        else:
            set_attributes(holder, {name: new[id(own[name])]}, is_complete=False)


def _keys_to_replace(items: Iterable[tuple[Any, Any]], new: Mapping[int, Any]) -> list[Any]:
    return [key for key, item in items if id(item) in new]
