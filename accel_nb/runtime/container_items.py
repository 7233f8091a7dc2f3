"""The items of Python's containers, also of classes that inherit from these and define other methods.

Such methods may raise, or mean something else, as those of tuples that stand for a mathematical object.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Any

_KINDS: tuple[Any, ...] = (OrderedDict, dict, list, tuple, set, frozenset, deque)


def items_of(container: Any, longest: int) -> Iterable[Any]:
    """Return the items of a container, of a dict the values; none if these are more than ``longest``."""
    kind = next(kind for kind in _KINDS if isinstance(container, kind))
    if kind.__len__(container) > longest:
        return ()
    if isinstance(container, dict):
        return kind.values(container)
    return container if type(container) is kind else list(kind.__iter__(container))
