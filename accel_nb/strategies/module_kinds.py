"""Keys that are equal for modules with the same computation, so that one trial is valid for all of them."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from accel_nb.runtime.tensors.instance_patching import innermost_class

_OF_MODULES = frozenset(vars(nn.Module()))
_POSITION_IN_MODEL = re.compile(r"(^|_)(layer|block)_?(idx|id|index|number)?$|^(idx|index)$")


def kind_of(module: nn.Module) -> Any:
    """Return a key that is equal for modules with the same computation.

    It has the classes of the module and its parts, the shapes of their parameters, and their attributes other than the
    module's position in a model. Plain values are compared by value, functions and other objects by identity.
    """
    shapes = tuple((name, tuple(value.shape)) for name, value in module.named_parameters(remove_duplicate=False))
    parts = tuple(
        (name, innermost_class(part), *((key, _key_of(value)) for key, value in vars(part).items() if _counts(key)))
        for name, part in module.named_modules()
    )
    return shapes, parts


def _counts(name: str) -> bool:
    return not (name in _OF_MODULES or name.startswith("_accel_nb") or _POSITION_IN_MODEL.search(name))


def _key_of(value: Any) -> Any:
    if value is None or type(value) in (int, float, bool, str):
        return type(value), value
    if type(value) in (list, tuple):
        return type(value), *map(_key_of, value)
    if type(value) is set:
        return frozenset(map(_key_of, value))
    if isinstance(value, dict):
        return type(value), *((key, _key_of(item)) for key, item in value.items())
    return id(value)
