"""Objects that modules hold under names that pickle does not look for.

They are constants without state, such as ``dataclasses.MISSING``, which code compares by ``is``, and classes that have
another name in their module than their own, as `torch.nn.attention.SDPBackend`.
"""

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


def name_in_module(kind: type) -> str | None:
    """Return the name of an imported class in its own module, None if the module does not have it."""
    module = None if kind.__module__ == "__main__" else sys.modules.get(kind.__module__)
    held = [] if module is None else list(vars(module).items())
    return next((name for name, value in held if value is kind), None)
