"""The submodules, parameters and buffers of modules, to change the structure of a module in place.

A cell may replace a layer of the notebook's model, add one, or change the dtype of its weights. Trainers, optimizers
and lists of the notebook refer to that model: it keeps its identity, and so does each part that is still the same object.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from accel_nb.pool.sync.object_kinds import is_module
from accel_nb.pool.sync.pickling import SharedId, shared_ids

_REGISTRIES = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")


class RecordedParts:
    """The parts of modules at one time, by weak references, with the paths that they had then."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        modules = {path: value for path, value in objects.items() if is_module(value)}
        ids = shared_ids(modules)
        parts = {id(part): part for module in modules.values() for part in _parts_of(module)}
        self._parts = [(weakref.ref(parts[key]), item) for key, item in ids.items() if key in parts]

    def shared_ids(self, paths: Iterable[str]) -> dict[int, SharedId]:
        """Return the ids of the parts of the modules at ``paths`` that are still alive, wherever they are now."""
        wanted = set(paths)
        living = ((reference(), item) for reference, item in self._parts if item[1] in wanted)
        return {id(part): item for part, item in living if part is not None}


def _parts_of(module: Any) -> Iterable[Any]:
    yield from module.modules()
    yield from module.parameters()
    yield from module.buffers()


def module_parts(module: Any, path: str, known: Mapping[int, SharedId]) -> dict[str, dict[str, Any]]:
    """Return the direct parts of each module in ``module`` that the receiver holds, by the path that it has there.

    ``known`` are the ids of the objects that the receiver holds, and ``path`` is that of ``module``.
    """
    found = {}
    for part in module.modules():
        kind, root, below = known.get(id(part), ("", "", ""))
        if root == path and kind in ("name", "module"):
            found[below] = {name: vars(part)[name].copy() for name in _REGISTRIES}
    return found


def set_module_parts(module: Any, parts: Mapping[str, Mapping[str, Any]]) -> None:
    """Give modules the direct parts that `module_parts` returned for another copy of the module."""
    held = {path: module.get_submodule(path) for path in parts}
    for path, registries in parts.items():
        for name, content in registries.items():
            registry = vars(held[path])[name]
            registry.clear()
            registry.update(content)


def has_replaceable_parts(
    module: Any, before: tuple[Any, ...], now: tuple[Any, ...], known: Mapping[int, SharedId]
) -> bool:
    """Return whether a module's parts can be replaced in place, and none of those that are known has another class.

    ``before`` and ``now`` are the structures of the module. The class of a lazy or parametrized layer changes.
    """
    classes, kinds = ({item[0]: item[1] for item in structure if len(item) == 2} for structure in (before, now))
    for path, part in module.named_modules():
        if not isinstance(vars(part).get("_modules"), dict):  # TorchScript
            return False
        if id(part) in known and classes.get(known[id(part)][2]) != kinds[path]:
            return False
    return True
