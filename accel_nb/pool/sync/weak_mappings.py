"""Mappings with weak references and views of mappings, which pickle refuses; ``functools.singledispatch`` has both."""

from __future__ import annotations

import gc
import types
import weakref
from typing import Any

_WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)


def is_weak_mapping(value: Any) -> bool:
    """Return whether the value is a mapping with weak references, or a view of a mapping."""
    return isinstance(value, (*_WEAK, types.MappingProxyType))


def reduce_weak_mapping(value: Any) -> tuple[Any, ...]:
    """Reduce a mapping to one with the items that it has now, a view to one of the same mapping."""
    shown = dict(value) if isinstance(value, _WEAK) else gc.get_referents(value)[0]
    return type(value), (shown,)
