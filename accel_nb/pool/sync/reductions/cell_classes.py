"""Classes of cells: each is made once in a process, without the code that runs where a class is defined.

cloudpickle makes a class before it looks whether the process has it already. A registry that ``__init_subclass__`` or a
metaclass fills would then have a class that nothing else uses.
"""

from __future__ import annotations

import enum
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from accel_nb.runtime.subclass_hooks import without_subclass_hooks

_CLASSES: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()
"""The classes by the id that cloudpickle has for them in all processes."""


def reduce_class(kind: type, reduced: Any) -> Any:
    """Return cloudpickle's reduction of a class, changed so that a class that the receiver has is not made again."""
    if not isinstance(reduced, tuple) or len(reduced) < 6:
        return reduced  # a class that can be imported
    make, arguments, *rest = reduced
    _CLASSES[arguments[-2]] = kind
    made = (make, arguments, kind.__qualname__)
    if issubclass(kind, enum.Enum):
        state, *items, set_state = rest
        members = {name: _own_attributes(member) for name, member in kind.__members__.items()}
        return _find_or_make, made, (set_state, state, members), *items, _set_state_and_members
    return _find_or_make, made, *rest


def _own_attributes(member: Any) -> dict[str, Any]:
    """Return the attributes that code has set on a member of an enumeration."""
    return {name: item for name, item in vars(member).items() if name[:1] != "_"}


def _set_state_and_members(kind: Any, content: tuple[Callable[..., Any], Any, Mapping[str, Any]]) -> None:
    set_state, state, members = content
    set_state(kind, state)
    for name, own in members.items():
        vars(kind.__members__[name]).update(own)


def _find_or_make(make: Callable[..., type], arguments: tuple[Any, ...], qualified_name: str) -> type:
    found = _CLASSES.get(arguments[-2])
    if found is None:
        bases = next(item for item in arguments if isinstance(item, tuple))
        # What ``__init_subclass__`` has changed is sent, its arguments are not.
        metaclass = arguments[0] if isinstance(arguments[0], type) else enum.EnumMeta
        with without_subclass_hooks(types.resolve_bases(bases), metaclass):
            found = _CLASSES[arguments[-2]] = make(*arguments)
        found.__qualname__ = qualified_name  # cloudpickle makes it with the last part of it only
    return found
