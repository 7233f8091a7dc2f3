"""An attribute of a class that an object's own attribute of the same name precedes, unlike a property."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class ComputedAttribute:
    """The result of a function of the object, until code sets the attribute on the object."""

    def __init__(self, compute: Callable[[Any], Any]) -> None:
        self._compute = compute

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else self._compute(instance)
