"""The items of containers with too many items for a separate path each: they are compared together.

Kernel and workers number the items alike. An item is sent as a reference to the container and its number there, so that
a list that a cell shuffles, or a slice that it takes, contains the receiver's objects. The contents of all items are
sent if one of them has changed.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from accel_nb.pool.sync.contents.content_kinds import content_of, set_content
from accel_nb.pool.sync.objects.shared_ids import ITEM, SharedId, SharedObjects
from accel_nb.pool.sync.stream.pickling import digest


@dataclass(frozen=True, slots=True)
class ItemsContent:
    """The fingerprints of a long container's content with its items by identity, and of the contents of these."""

    order: bytes
    contents: bytes
    items: tuple[Any, ...] = field(compare=False)
    """Empty if the receiver may have them in another order."""

    def without_items(self) -> ItemsContent:
        """Return the fingerprints of a container that is sent whole if it changes."""
        return replace(self, items=())


def items_content(content: Any, items: Sequence[Any], namespace: dict[str, Any], shared: SharedObjects) -> ItemsContent:
    """Return the fingerprints of a container with a ``content``; objects in ``shared`` have separate ones."""
    if len(content[0]) == len(items) and all(map(operator.is_, content[0], items)):  # the usual list, without tuples
        order = digest((array("Q", map(id, items)).tobytes(), *content[1:]), namespace=namespace, shared=shared)
    else:
        order = digest(content, namespace=namespace, shared=_WithItems(shared, items))
    return ItemsContent(order, _digest_items(items, namespace, shared), tuple(items))


def changed_contents(before: Any, now: Any, namespace: dict[str, Any], shared: SharedObjects) -> list[Any] | None:
    """Return the contents of the items of ``before``, if this is an `ItemsContent` and one of them has changed.

    ``now`` is the present content of the container. The content of an item in ``shared``, and of one that cannot be
    changed in place, is None.
    """
    if not isinstance(before, ItemsContent) or not before.items:
        return None
    are_same = isinstance(now, ItemsContent) and sorted(map(id, now.items)) == sorted(map(id, before.items))
    if (now.contents if are_same else _digest_items(before.items, namespace, shared)) == before.contents:
        return None
    return [None if id(item) in shared else _copy_content(item) for item in before.items]


def item_ids(before: Mapping[str, Any], contents: Mapping[str, Sequence[Any]]) -> SharedObjects:
    """Return the ids of the items of containers by path, as kernel and workers share them.

    ``contents`` are the changed contents by path; items for which it has None are sent whole and get no id.
    """
    found: dict[int, SharedId] = {}
    for path, content in before.items():
        if not isinstance(content, ItemsContent):
            continue
        new, size = contents.get(path), len(content.items)
        for number, item in enumerate(content.items):
            if new is None or new[number] is not None:
                found.setdefault(id(item), (ITEM, path, f"{number}/{size}"))
    return SharedObjects(found)


def set_item_contents(items: Sequence[Any], contents: Sequence[Any]) -> None:
    """Set the contents of items to those of `changed_contents` of as many items."""
    for item, content in zip(items, contents, strict=True):
        if content is None:
            continue
        if type(item) is list:
            item[:] = content
        elif type(item) is dict:
            item.clear()
            item.update(content)
        else:
            set_content(item, content[1])


def _copy_content(item: Any) -> Any:
    """Return the content of an item; for lists and dicts a copy, which is sent and set in a fraction of the time."""
    return item.copy() if type(item) in (list, dict) else content_of(item)


def _digest_items(items: Sequence[Any], namespace: dict[str, Any], shared: SharedObjects) -> bytes:
    return digest(sorted(items, key=id), namespace=namespace, shared=shared)  # equal after a permutation


class _WithItems(SharedObjects):
    """Shared objects, and items that are also referred to by identity; lookups of shared objects are recorded."""

    def __init__(self, shared: SharedObjects, items: Sequence[Any]) -> None:
        super().__init__({id(item): (ITEM, "", "") for item in items}, shared.owners.values())
        self._shared_objects = shared

    def get(self, key: int, default: Any = None) -> Any:
        found = self._shared_objects.get(key)
        return super().get(key, default) if found is None else found
