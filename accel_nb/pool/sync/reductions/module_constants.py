"""Constants of modules without state, such as ``dataclasses.MISSING``, which code compares by ``is``."""

from __future__ import annotations

import sys
import weakref

from accel_nb.pool.sync.objects.object_kinds import attributes_of

_constants: weakref.WeakKeyDictionary[type, dict[int, str]] = weakref.WeakKeyDictionary()
"""By class, the constants of the class's module by id, each with its name there."""


def constants_of(kind: type) -> dict[int, str]:
    """Return by id the names of a class's objects without state that are attributes of the class's own module."""
    if (found := _constants.get(kind)) is None:
        module = sys.modules.get(kind.__module__)
        has_module = module is not None and kind.__module__ not in ("__main__", "builtins")
        is_usual = kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__
        attributes = list(vars(module).items()) if has_module and is_usual and not issubclass(kind, type) else []
        found = {id(value): name for name, value in attributes if type(value) is kind and not attributes_of(value)}
        _constants[kind] = found
    return found
