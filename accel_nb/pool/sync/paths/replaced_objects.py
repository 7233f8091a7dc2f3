"""Objects that came back as new ones: the new one takes the place of the old one in the values of the notebook.

Python cannot make one object take the place of another in the whole process. Where else the old one is in use, as in a
tuple, this is reported.
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
"""Those of the dict of old objects, and of the argument of `sys.getrefcount`."""


def put_in_place(old: Mapping[str, Any], values: Mapping[str, Any], namespace: dict[str, Any]) -> list[str]:
    """Put the values that some names have now in the place of their ``old`` ones; return other names that had these.

    ``values`` are those of the notebook, whose names are bound in ``namespace``.
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
            _put_in(holder, new)
    return rebound


def describe_other_uses(old: dict[str, Any]) -> dict[str, str]:
    """Return by name a line for each of the ``old`` objects that something else refers to, and empty ``old``."""
    kinds = {name: type(value).__name__ for name, value in old.items()}
    weak = {name: weakref.ref(value) for name, value in old.items() if type(value).__weakrefoffset__}
    for name in weak:  # old ones may refer to each other
        del old[name]
    if _find_used(weak, old):
        gc.collect()  # of what refers to the old ones, some may be garbage
    used = _find_used(weak, old)
    old.clear()
    return {
        name: f"{name} is a new object, since a {kinds[name]} cannot be changed in place; what else refers to it has "
        "the one of before"
        for name in kinds
        if name in used
    }


def _find_used(weak: Mapping[str, weakref.ref[Any]], old: Mapping[str, Any]) -> set[str]:
    alive = {name for name, reference in weak.items() if reference() is not None}
    return alive.union(name for name in old if sys.getrefcount(old[name]) > _OWN_REFERENCES)


def _put_in(holder: Any, new: Mapping[int, Any]) -> None:
    """Replace what a container, a closure's cell, a class or an object refers to directly."""
    if isinstance(holder, list | deque):
        for index in _places(enumerate(holder), new):
            holder[index] = new[id(holder[index])]
    elif isinstance(holder, dict):
        for key in _places(holder.items(), new):
            dict.__setitem__(holder, key, new[id(holder[key])])
    elif isinstance(holder, types.CellType):
        with suppress(ValueError):  # the cell is empty
            holder.cell_contents = new.get(id(holder.cell_contents), holder.cell_contents)
    own = attributes_of(holder) or {}
    for name in _places(own.items(), new):
        if is_notebook_class(holder):
            setattr(holder, name, new[id(own[name])])
        else:
            set_attributes(holder, {name: new[id(own[name])]}, is_complete=False)


def _places(items: Iterable[tuple[Any, Any]], new: Mapping[int, Any]) -> list[Any]:
    return [place for place, item in items if id(item) in new]
