"""The submodules, parameters and buffers of modules, to change the structure of a module in place.

A cell may replace a layer of the notebook's model, add one, or change the dtype of its weights. Trainers, optimizers
and lists of the notebook refer to that model: it keeps its identity, and so does each part that still exists. The
*direct parts* of a module are its own parameters, buffers and submodules, not those of its submodules.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from accel_nb.pool.sync.objects.object_kinds import is_lazy, is_module, is_tensor
from accel_nb.pool.sync.objects.shared_ids import SharedId, SharedObjects, shared_ids
from accel_nb.runtime.tensors.module_paths import submodule_at

ResolvedParts = list[tuple[Any, Mapping[str, Any]]]
"""Modules, each with its direct parts by the name of the registry."""
_REGISTRIES = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")
"""The attributes in which an nn.Module registers its parts."""


class RecordedParts:
    """The parts of modules at one time, by weak references, with the paths that they had then."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        from accel_nb.runtime.tensors.instance_patching import innermost_class

        modules = {path: value for path, value in objects.items() if is_module(value)}
        ids = shared_ids(modules)
        parts = {id(part): part for module in modules.values() for part in module.modules()} | ids.owners
        self._parts = [
            (weakref.ref(part), innermost_class(part), _dtype_and_size(part), item)
            for key, item in ids.items()
            if (part := parts.get(key)) is not None
        ]
        places: dict[int, list[tuple[weakref.ref[Any], str]]] = {}
        for module in modules.values():
            if id(module) not in places:
                places[id(module)] = [(weakref.ref(part), place) for place, part in _placed_parts(module)]
        self._places = {path: places[id(module)] for path, module in modules.items()}

    def places_of(self, path: str) -> dict[int, str]:
        """Return by id, for the alive parts that the module at ``path`` had, their paths in this module."""
        alive = [(reference(), place) for reference, place in self._places.get(path, ())]
        return {id(part): place for part, place in alive if part is not None}

    def find_relocated(self, modules: Mapping[str, Any]) -> set[str]:
        """Return the paths of ``modules`` with a part that was at another place then, there or in another module."""
        known = {id(part) for reference, *_ in self._parts if (part := reference()) is not None}
        found: set[str] = set()
        for path, module in modules.items():
            places = self.places_of(path)
            if any(id(part) in known and places.get(id(part)) != now for now, part in _placed_parts(module)):
                found.add(path)
        return found

    def shared_ids(self, paths: Iterable[str]) -> SharedObjects:
        """Return the ids of the alive parts that the modules at ``paths`` had, whichever module contains them now.

        A module whose class has changed, as that of a lazy layer in its first call, is left out as a new one. A tensor
        whose dtype or size has changed is not among the owners of memory: the receiver's tensor gets other memory.
        """
        from accel_nb.runtime.tensors.instance_patching import innermost_class

        wanted = set(paths)
        alive = [(reference(), kind, size, item) for reference, kind, size, item in self._parts if item[1] in wanted]
        found = [
            (part, size, item)
            for part, kind, size, item in alive
            if part is not None and (not is_module(part) or innermost_class(part) is kind)
        ]
        owners = [part for part, size, _ in found if is_tensor(part) and _dtype_and_size(part) == size]
        return SharedObjects({id(part): item for part, _, item in found}, owners)


def _dtype_and_size(part: Any) -> tuple[Any, ...] | None:
    return (part.dtype, tuple(part.shape)) if is_tensor(part) and not is_lazy(part) else None


def _placed_parts(module: Any) -> Iterator[tuple[str, Any]]:
    yield from module.named_modules()
    yield from module.named_parameters()


def module_parts(module: Any, before: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return the direct parts of each module in ``module`` that the receiver holds, by the path that it has there.

    ``before`` are the receiver's paths by the present ones, as `paths_before` returns them.
    """
    return {
        before[now]: {name: vars(part)[name].copy() for name in _REGISTRIES}
        for now, part in module.named_modules()
        if now in before
    }


def paths_before(module: Any, places: Mapping[int, str], receiver_ids: Mapping[int, SharedId]) -> dict[str, str]:
    """Return the receiver's paths of submodules and parameters, by their present paths.

    ``places`` are the former paths of parts by id, and ``receiver_ids`` the ids of the objects that the receiver holds.
    """
    parts = [(now, id(part)) for now, part in _placed_parts(module)]
    return {now: places[key] for now, key in parts if key in places and key in receiver_ids}


def resolve_parts(module: Any, parts: Mapping[str, Mapping[str, Any]]) -> ResolvedParts:
    """Return the parts that `module_parts` found in another copy of the module, with submodules instead of paths."""
    return [(submodule_at(module, path), registries) for path, registries in parts.items()]


def set_module_parts(parts: ResolvedParts) -> None:
    """Set the direct parts of modules."""
    for module, registries in parts:
        for name, content in registries.items():
            registry = vars(module)[name]
            registry.clear()
            registry.update(content)


def can_set_parts(module: Any, receiver_ids: Mapping[int, SharedId]) -> bool:
    """Return whether the parts of a shared module can be changed in place; those of TorchScript cannot."""
    return id(module) in receiver_ids and all(isinstance(vars(part).get("_modules"), dict) for part in module.modules())
