"""The objects that values contained before a cell, to report other references to those that the cell has replaced.

Items of sets and attributes that cannot be changed in place have no paths: after the cell the value contains new
objects in their place. If another name or value still refers to an earlier one, this is reported.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from accel_nb.pool.sync.contents.long_items import changeable_items
from accel_nb.pool.sync.objects.object_kinds import attributes_of, is_module
from accel_nb.pool.sync.objects.shared_ids import has_identity
from accel_nb.pool.sync.paths.object_paths import readable_path, resolve_path
from accel_nb.runtime.container_items import items_of

_COLLECTIONS = (list, tuple, set, frozenset, deque)
_WEAK = weakref.WeakSet | weakref.WeakKeyDictionary | weakref.WeakValueDictionary
_OWN_REFERENCES = 2
"""References by the list of earlier objects, and by of the argument of `sys.getrefcount`."""


class ItemsBefore:
    """The objects inside of the values at some paths, before the values are changed; only objects without own paths."""

    def __init__(
        self,
        paths: Iterable[str],
        replaced: Iterable[str],
        namespace: Mapping[str, Any],
        shared_ids: Callable[[], Collection[int]],
        contents: Mapping[str, Sequence[Any]],
    ) -> None:
        """``paths`` are those of values that are changed, ``replaced`` those of values that are replaced as a whole.

        Lists and dicts inside of ``replaced`` values are not recorded: references to them could keep the values alive.
        ``contents`` are the new contents of the items of long containers, by path.
        """
        self._namespace = namespace
        self._weak: dict[str, list[weakref.ref[Any]]] = {}
        self._other: dict[str, list[Any]] = {}
        whole = set(replaced)
        found = [(path, item) for path in (*paths, *whole) for item in _items(_find(namespace, path))]
        known = {*shared_ids(), *_ids_of_kept_items(paths, namespace, contents)} if found else ()
        for path, item in found:
            if id(item) in known:
                continue
            if type(item).__weakrefoffset__:
                self._weak.setdefault(path, []).append(weakref.ref(item))
            elif path not in whole:  # there are no weak references to lists and dicts
                self._other.setdefault(path, []).append(item)

    def describe_other_uses(self, except_paths: Collection[str]) -> list[str]:
        """Return a line for each path, except ``except_paths``, whose earlier objects are still in use elsewhere."""
        if not self._find_used():
            return []
        gc.collect()  # objects that refer to the earlier ones may be garbage
        found = [path for path in self._find_used() if path not in except_paths]
        return [
            f"{readable_path(path)} contains new objects after the cell; other variables that refer to the earlier "
            "ones have them as they were before it"
            for path in found
        ]

    def _find_used(self) -> list[str]:
        return [path for path in {**self._weak, **self._other} if self._is_used(path)]

    def _is_used(self, path: str) -> bool:
        present = {id(item) for item in _items(_find(self._namespace, path))}
        alive = (reference() for reference in self._weak.get(path, ()))
        if any(item is not None and id(item) not in present for item in alive):
            return True
        others = self._other.get(path, [])
        # Not by a variable for each, of which Python counts the reference up to 3.13 only.
        return any(
            sys.getrefcount(others[number]) > _OWN_REFERENCES and id(others[number]) not in present
            for number in range(len(others))
        )


def _ids_of_kept_items(
    paths: Iterable[str], namespace: Mapping[str, Any], contents: Mapping[str, Sequence[Any]]
) -> set[int]:
    """Return the ids of the items of long containers that are changed in place, if at all."""
    found: set[int] = set()
    for path in paths:
        items, new = changeable_items(_find(namespace, path)), contents.get(path)
        found.update(id(item) for number, item in enumerate(items) if new is None or new[number] is not None)
    return found


def _find(namespace: Mapping[str, Any], path: str) -> Any:
    try:
        return resolve_path(namespace, path)
    except LookupError:  # it no longer exists
        return None


def _items(value: Any) -> Iterator[Any]:
    """Yield the objects with an identity that a container or an object refers to.

    Those of weak collections, frozen sets and tuples in it are included.
    """
    waiting, seen = [value], set[int]()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        own = {} if isinstance(value, _WEAK) else attributes_of(value) or {}
        waiting += [item for item in own.values() if isinstance(item, _WEAK)]
        if isinstance(value, type) or is_module(value):  # its methods, or its parts, are replaced together with it
            continue
        for item in (*_contained_items(value), *own.values()):
            if isinstance(item, frozenset | tuple):
                waiting.append(item)
            elif has_identity(item) and not isinstance(item, weakref.ref):
                yield item


def _contained_items(value: Any) -> Iterable[Any]:
    """Return the items of a container, and the keys of a dict that refers to them weakly."""
    if isinstance(value, weakref.WeakSet):
        return value
    if isinstance(value, weakref.WeakKeyDictionary):
        return [*value.keys(), *value.values()]
    if isinstance(value, dict | weakref.WeakValueDictionary):
        return value.values()
    return items_of(value, sys.maxsize) if isinstance(value, _COLLECTIONS) else ()
