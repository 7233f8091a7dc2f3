"""The items of Python's containers, also of subclasses whose methods are overridden.

Such methods may raise or do something else, as in tuples that represent mathematical objects.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Any

_KINDS: tuple[Any, ...] = (OrderedDict, dict, list, tuple, set, frozenset, deque)


def items_of(container: Any, longest: int) -> Iterable[Any]:
    """Return the items of a container (the values of a dict); none if there are more than ``longest``."""
    kind = next(kind for kind in _KINDS if isinstance(container, kind))
    if kind.__len__(container) > longest:
        return ()
    if isinstance(container, dict):
        return kind.values(container)
    return container if type(container) is kind else list(kind.__iter__(container))
