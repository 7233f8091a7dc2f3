"""Classes of cells: each is made once in a process, without the code that runs where a class is defined.

cloudpickle makes a class before it looks whether the process has it already. A registry that ``__init_subclass__`` or a
metaclass fills would then have a class that nothing else uses.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any

from accel_nb.runtime.subclass_hooks import without_subclass_hooks

_CLASSES: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()
"""The classes by the id that cloudpickle has for them in all processes."""


def reduce_class(kind: type, reduced: Any) -> Any:
    """Return cloudpickle's reduction of a class, changed so that a class that the receiver has is not made anew."""
    if not isinstance(reduced, tuple) or len(reduced) < 6:
        return reduced  # a class that can be imported
    make, arguments, *rest = reduced
    _CLASSES[arguments[-2]] = kind
    return _find_or_make, (make, arguments), *rest


def _find_or_make(make: Callable[..., type], arguments: tuple[Any, ...]) -> type:
    found = _CLASSES.get(arguments[-2])
    if found is None:
        bases = next(item for item in arguments if isinstance(item, tuple))
        # What ``__init_subclass__`` has changed is sent, its arguments are not.
        with without_subclass_hooks(types.resolve_bases(bases)):
            found = _CLASSES[arguments[-2]] = make(*arguments)
    return found
