"""Objects at one time, which are compared by identity with those at another time."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from accel_nb.runtime.distributed.sharded import current_replacement


class Identities:
    """Modules, parameters and functions in order: equal to others that are the same, or their sharded replacements.

    They are referenced weakly; what no longer exists equals nothing.
    """

    __slots__ = ("_references",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, objects: Iterable[Any]) -> None:
        self._references = tuple(map(weakref.ref, objects))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Identities) or len(self._references) != len(other._references):
            return False
        pairs = zip(self._references, other._references, strict=True)
        return all((one := current_replacement(a())) is not None and one is current_replacement(b()) for a, b in pairs)
