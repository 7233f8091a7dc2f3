"""The items of containers that have too many for each to have a path of its own."""

from __future__ import annotations

import sys
from collections import deque
from typing import Any

from accel_nb.pool.sync.contents.plain_objects import is_array, is_known_dict, is_plain_object
from accel_nb.pool.sync.objects.class_attributes import is_enum_member
from accel_nb.pool.sync.objects.object_kinds import is_tensor
from accel_nb.runtime.container_items import items_of

MAX_ITEMS = 128
"""The items of containers with more have no paths (`accel_nb.pool.sync.long_containers`)."""
MAX_COUNTED = 100_000
"""Of a container with more items than these, the items have no identity in the receiving process."""

COMMON_ATOMIC_TYPES = frozenset({int, float, str, bool, type(None), bytes})
"""The types of most of the items that refer to nothing."""


def changeable_items(container: Any) -> list[Any]:
    """Return the items of a container that has more than `MAX_ITEMS` whose content is read and set in place.

    Those in tuples come after those of the container itself. None are returned if there are more than `MAX_COUNTED`.
    """
    base: Any = next((kind for kind in (list, dict, deque) if isinstance(container, kind)), None)
    if base is None or base.__len__(container) <= MAX_ITEMS:  # a subclass may define another length
        return []
    found: list[Any] = []
    level = list(items_of(container, sys.maxsize))
    while level:
        samples = {type(item): item for item in level}
        kinds = {kind for kind, item in samples.items() if kind not in COMMON_ATOMIC_TYPES and _is_changeable(item)}
        if kinds:
            found += [item for item in level if type(item) in kinds]
        tuples = {kind for kind in samples if issubclass(kind, tuple)}
        level = [part for item in level if type(item) in tuples for part in tuple.__iter__(item)] if tuples else []
    return found if len(found) <= MAX_COUNTED else []


def _is_changeable(value: Any) -> bool:
    if type(value) in (list, set, deque, bytearray) or is_tensor(value) or is_array(value) or is_known_dict(value):
        return True
    return is_plain_object(value) and not is_enum_member(value)
