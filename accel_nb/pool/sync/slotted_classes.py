"""Classes of cells with ``__slots__``: cloudpickle rebuilds them without, so that their objects had a ``__dict__``."""

from __future__ import annotations

from typing import Any, NamedTuple


def with_slots(kind: type, reduced: Any) -> Any:
    """Return cloudpickle's reduction of a class, changed so that the class is made with its slots."""
    if "__slots__" not in vars(kind) or not isinstance(reduced, tuple) or len(reduced[1]) != 6:
        return reduced  # a class without slots, one that can be imported, or an enum
    make, (metaclass, name, bases, body, *rest), *state = reduced
    if NamedTuple in bases:
        return reduced  # it is made with slots, and must not name them
    return make, (metaclass, name, bases, {**body, "__slots__": vars(kind)["__slots__"]}, *rest), *state
