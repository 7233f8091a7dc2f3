"""Collections with weak references, and views of mappings, which pickle refuses.

``functools.singledispatch`` has both. On the workers such a collection keeps its objects: what refers to them in the
notebook may not be there.
"""

from __future__ import annotations

import gc
import types
import weakref
from typing import Any

_WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)


def is_weak_collection(value: Any) -> bool:
    """Return whether the value is a set or mapping with weak references, or a view of a mapping."""
    return type(value) is weakref.WeakSet or isinstance(value, (*_WEAK, types.MappingProxyType))


def reduce_weak_collection(value: Any, *, is_returned: bool) -> tuple[Any, ...]:
    """Reduce a collection to one with the items that it has now, a view to one of the same mapping."""
    if isinstance(value, types.MappingProxyType):
        return type(value), (gc.get_referents(value)[0],)
    items = dict(value) if isinstance(value, _WEAK) else list(value)
    return type(value) if is_returned else _keeping, (items,) if is_returned else (type(value), items)


def _keeping(kind: type, items: Any) -> Any:
    """Return a collection that keeps its objects as long as it exists."""
    made = kind(items)
    weakref.finalize(made, items.clear).atexit = False
    return made
