"""Classes of cells with members that only have an effect in the class body; cloudpickle sets members afterwards.

Objects of a class without its ``__slots__`` had a ``__dict__``. A ``__name__`` set afterwards renames the class.
"""

from __future__ import annotations

from typing import Any, NamedTuple

_CLASS_BODY_MEMBERS = ("__slots__", "__name__")


def with_body_members(kind: type, reduced: Any) -> Any:
    """Return cloudpickle's reduction of a class, changed so that the class is made with such members."""
    members = {name: vars(kind)[name] for name in _CLASS_BODY_MEMBERS if name in vars(kind)}
    if not members or not isinstance(reduced, tuple) or len(reduced[1]) != 6:
        return reduced  # a class without such members, an importable class, or an enum
    make, (metaclass, name, bases, body, *rest), (state, slots), *items = reduced
    if NamedTuple in bases:
        return reduced  # it is made with slots, and must not name them
    state = {name: item for name, item in state.items() if name != "__name__"}
    return make, (metaclass, name, bases, {**body, **members}, *rest), (state, slots), *items
