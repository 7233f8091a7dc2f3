"""The state of a worker's namespace before a cell runs, to detect what the cell has bound and changed."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from accel_nb.pool.sync.change_detection import (
    Fingerprint,
    content_fingerprint,
    fingerprint_of,
    is_compared_by_identity,
    is_state_sharded,
    module_structure,
)
from accel_nb.pool.sync.contents.content_kinds import content_of
from accel_nb.pool.sync.namespace_sync import Namespace
from accel_nb.pool.sync.objects.module_parts import RecordedParts, can_set_parts
from accel_nb.pool.sync.objects.object_kinds import (
    is_loader,
    is_module,
    is_optimizer,
    is_plain_array,
    is_tensor,
    is_training_object,
)
from accel_nb.pool.sync.objects.shared_ids import OptimizerParts, SharedObjects, has_identity, shared_ids
from accel_nb.pool.sync.paths.function_caches import cached_functions
from accel_nb.pool.sync.paths.object_paths import is_below_training_object, referenced_objects, root_name
from accel_nb.pool.sync.references import ReferenceRecorder
from accel_nb.runtime.distributed.sharded import current_replacement


@dataclass(slots=True)
class RecordedObject:
    """The record of an object before a cell runs."""

    reference: Any
    """The object, or a weak reference to it."""
    fingerprint: Fingerprint | None = None
    """That of the object's content, if the cell may change the object and its changes can be detected."""
    is_tracked: bool = False
    """Whether the cell may change the object: it uses the object's name, or a name that refers to it."""


@dataclass(slots=True)
class NamespaceSnapshot:
    """The state of a namespace before a cell runs, to detect changes afterwards."""

    bindings: dict[str, Any]
    objects: dict[str, RecordedObject]
    """By path: the values of names that the cell uses, and the objects reachable from shared names."""
    shared: dict[str, None]
    module_parts: RecordedParts
    """The submodules, parameters and buffers of the nn.Modules that kernel and workers share."""
    rebound: frozenset[str] = frozenset()
    """The names that the cell's code binds."""
    imported: SharedObjects = field(default_factory=SharedObjects)
    """The ids of objects that imported Python modules define, in kernel and workers alike."""
    misses: dict[str, int] = field(default_factory=dict[str, int])
    """Cache misses so far of the `lru_cache` functions that the cell uses, by their names."""

    @classmethod
    def take(
        cls,
        namespace: Namespace,
        used: Iterable[str],
        *,
        shared: Collection[str] = (),
        rebound: Collection[str] = (),
        contained: Collection[str] = (),
        imported: SharedObjects | None = None,
    ) -> NamespaceSnapshot:
        """Record every binding, and the objects that the cell may change: those of ``used`` names and below.

        ``shared`` are the names that the kernel holds too. Objects of ``rebound`` names with models, tensors or arrays
        are referenced weakly, so that a cell that creates a new model can use the memory of the old one, except for
        ``contained`` names, whose objects other values of the notebook contain.
        """
        bound = dict(namespace)  # a copy: threads of an earlier cell may bind and delete names meanwhile
        shared = dict.fromkeys(name for name in shared if name in bound)
        rebound = frozenset(rebound)
        known = {id(bound[name]) for name in shared}
        referenced: dict[str, dict[str, Any]] = {}
        for name in shared:
            found = {
                path: part for path, part in referenced_objects(name, bound[name]).items() if id(part) not in known
            }
            if found:
                known.update(map(id, found.values()))
                referenced[name] = found
        waiting, seen = [name for name in used if name in bound], set(used)
        objects = _objects(bound, shared, referenced) if waiting else {}
        imported = SharedObjects() if imported is None else imported
        references = ReferenceRecorder(imported.merge(shared_ids(objects)))
        fingerprints: dict[str, Fingerprint | None] = {}
        tracked: dict[str, Any] = {}
        while waiting:
            name = waiting.pop()
            tracked[name] = bound[name]
            for path, value in ((name, bound[name]), *referenced.get(name, {}).items()):
                fingerprints[path] = tracked_fingerprint(value, namespace, references)
            references.look_up_parts(bound[name])
            further = {root_name(path) for path in references.looked_up} - seen
            waiting += further & bound.keys()
            seen |= further
            references.looked_up.clear()
        misses = {
            label: function.cache_info().misses
            for name, value in tracked.items()
            for label, function in cached_functions(name, value)
        }
        weak = {
            name
            for name in (rebound & bound.keys()) - set(contained)
            if _has_memory(bound[name], referenced.get(name, {}).values())
        }
        for name in weak:
            bound[name] = _to_weak(bound[name])
        recorded = {
            path: RecordedObject(
                _to_weak(value) if root_name(path) in weak else value, fingerprints.get(path), path in fingerprints
            )
            for found in (tracked, *referenced.values())
            for path, value in found.items()
        }
        return cls(bound, recorded, shared, RecordedParts(objects), rebound, imported, misses)

    def is_bound(self, name: str, value: Any) -> bool:
        """Return whether a name has the same object as before."""
        if name not in self.bindings:
            return False
        recorded = self.bindings[name]
        if value is None:  # to which a weak reference resolves whose object is gone
            return recorded is None
        return _resolve_weak(recorded) is value or recorded is value

    def is_new(self, name: str, value: Any) -> bool:
        """Return whether the cell has, as far as detectable, bound a name to a value that the notebook may lack."""
        if not self.is_bound(name, value):
            return True
        return name in self.rebound and name not in self.shared and not has_identity(value)

    def is_in_tracked_module(self, parameter: Any) -> bool:
        """Return whether a parameter is one of a module whose changes are detected."""
        modules = [
            value for path, value in self.alive_objects().items() if self.objects[path].is_tracked and is_module(value)
        ]
        return any(parameter is value for module in modules for value in module.parameters())

    def alive_objects(self) -> dict[str, Any]:
        """Return the recorded objects that are still alive, by path."""
        found = {path: _resolve_weak(recorded.reference) for path, recorded in self.objects.items()}
        return {path: value for path, value in found.items() if value is not None}

    def shared_ids(self, changed: Collection[str] = ()) -> SharedObjects:
        """Return the ids of objects that kernel and workers share and that are still alive.

        ``changed`` are the paths of modules with other parts than before: of these, parts that are new have no id.
        """
        names = {name: _resolve_weak(self.bindings[name]) for name in self.shared}
        objects = names | {
            path: value for path, value in self.alive_objects().items() if root_name(path) in self.shared
        }
        changed = self._with_other_names(changed, objects)
        unchanged = {path: value for path, value in objects.items() if path not in changed}
        fingerprints = {path: recorded.fingerprint for path, recorded in self.objects.items() if recorded.is_tracked}
        optimizer_parts = {
            path: found.content.parts if (found := fingerprints[path]) else OptimizerParts()
            for path, value in unchanged.items()
            if path in fingerprints and is_optimizer(value)
        }
        found = self.imported.merge(shared_ids(unchanged, optimizer_parts))
        return self.module_parts.shared_ids(changed).merge(found) if changed else found

    def contents(self) -> dict[str, Any]:
        """Return by path the contents in the fingerprints of objects that kernel and workers share."""
        return {
            path: recorded.fingerprint.content
            for path, recorded in self.objects.items()
            if recorded.fingerprint is not None and root_name(path) in self.shared
        }

    def drop_replaced(self) -> None:
        """Drop the records of tensors and arrays below modules whose size or type has changed: they are sent again."""
        for path, value in self.alive_objects().items():
            found = self.objects[path].fingerprint
            if found is None or not is_below_training_object(path) or not (is_tensor(value) or is_plain_array(value)):
                continue
            content = content_of(value)
            if found.kind[0] != "view" and (content is None or content[0] != found.kind):
                del self.objects[path]

    def modules_with_relocated_parts(self) -> set[str]:
        """Return the paths of shared modules with a part that was at another place before, there or in another one."""
        return self.module_parts.find_relocated(self._tracked_modules())

    def changed_modules(self, relocated: Collection[str]) -> list[str]:
        """Return the paths of shared modules whose parts the cell has changed, which are then changed in place.

        ``relocated`` is the result of `modules_with_relocated_parts`.
        """
        return [
            path
            for path, value in self._tracked_modules().items()
            if (path in relocated or module_structure(value) != self._kind(path))
            and not is_state_sharded(value)
            and can_set_parts(value, self.module_parts.shared_ids(self._with_other_names([path], self.bindings)))
        ]

    def _tracked_modules(self) -> dict[str, Any]:
        """Return by path the alive shared modules that the cell may have changed."""
        alive = self.alive_objects().items()
        return {
            path: value
            for path, value in alive
            if is_module(value) and self._kind(path) is not None and root_name(path) in self.shared
        }

    def _kind(self, path: str) -> Any:
        fingerprint = self.objects[path].fingerprint
        return None if fingerprint is None else fingerprint.kind

    def _with_other_names(self, changed: Collection[str], objects: Mapping[str, Any]) -> set[str]:
        """Return the paths of changed modules, and those of modules that the cell does not use and that share parts."""
        if not changed:
            return set()
        alive = self.alive_objects()
        parts = {id(part) for path in changed for part in alive[path].modules()}
        others = {path: _resolve_weak(value) for path, value in objects.items() if not self._is_tracked(path)}
        return {*changed} | {
            path
            for path, value in others.items()
            if is_module(value) and any(id(part) in parts for part in value.modules())
        }

    def _is_tracked(self, path: str) -> bool:
        return path in self.objects and self.objects[path].is_tracked


def _objects(namespace: Namespace, names: Iterable[str], referenced: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    objects = {name: namespace[name] for name in names}
    for found in referenced.values():
        objects.update(found)
    return objects


def _has_memory(value: Any, referenced: Iterable[Any]) -> bool:
    """Return whether a value, or an object that it refers to, is a tensor, array, training object or loader."""
    return any(
        is_training_object(item) or is_tensor(item) or is_plain_array(item) or is_loader(item)
        for item in (value, *referenced)
    )


class _WeakReference(weakref.ref[Any]):
    """A weak reference of a snapshot; one of the user's is a value itself."""

    __slots__ = ()


def _to_weak(value: Any) -> Any:
    """Return a weak reference to a value, or the value if its type does not support these."""
    try:
        return _WeakReference(value)
    except TypeError:
        return value


def _resolve_weak(reference: Any) -> Any:
    return current_replacement(reference() if type(reference) is _WeakReference else reference)


def tracked_fingerprint(value: Any, namespace: Namespace, shared: SharedObjects) -> Fingerprint | None:
    """Return the fingerprint of a value; None if its changes are not tracked."""
    if is_compared_by_identity(value):
        return None
    if is_loader(value):
        return content_fingerprint(value, namespace, shared)
    try:
        return fingerprint_of(value, namespace, shared)
    except Exception:  # a value that cannot be copied cannot be returned, so its changes are not tracked
        return content_fingerprint(value, namespace, shared)
