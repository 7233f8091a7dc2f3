"""Ids of the objects that both sides hold, which are sent as references."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any, Literal

from accel_nb.pool.sync.module_hooks import FLAGS, HOOKS
from accel_nb.pool.sync.object_kinds import is_module, is_optimizer
from accel_nb.pool.sync.user_hooks import GRADIENT_HOOKS, OPTIMIZER_HOOKS

SharedId = tuple[str, str, str]
"""The id of an object that both sides hold: (kind, path from a name, path below it in a module or attribute)."""


OUTDATED: SharedId = ("outdated", "", "")
"""The id of an iterator of the notebook that workers have read from: it is referred to, and never sent again."""

ObjectId = tuple[Literal["id"], Any]
"""The `id` of an object: that of a `SharedId`, or of an object in the stream."""


def shared_ids(objects: Mapping[str, Any]) -> dict[int, SharedId]:
    """Return ids for ``objects`` (by name) and their parts.

    These are the submodules, parameters and buffers of modules, and the dicts that hold hooks.
    """
    ids: dict[int, SharedId] = {}
    for name, value in objects.items():
        if not has_identity(value):
            continue
        ids.setdefault(id(value), ("name", name, ""))
        if is_module(value):
            for path, part in value.named_modules():
                ids.setdefault(id(part), ("module", name, path))
                own = vars(part)
                for attribute in (*HOOKS, *FLAGS):
                    # The handle of a hook refers to the dicts of flags too, which may be empty.
                    if (held := own.get(attribute)) or own.get(FLAGS.get(attribute)):
                        ids.setdefault(id(held), ("hooks", name, f"{path}:{attribute}"))
            for path, part in value.named_parameters():
                ids.setdefault(id(part), ("parameter", name, path))
                for attribute in GRADIENT_HOOKS:
                    if part.is_leaf and (held := getattr(part, attribute)):
                        ids.setdefault(id(held), ("gradient hooks", name, f"{path}:{attribute}"))
            for path, part in value.named_buffers():
                ids.setdefault(id(part), ("buffer", name, path))
        elif is_optimizer(value):
            for attribute in OPTIMIZER_HOOKS:
                if attribute in vars(value):
                    ids.setdefault(id(vars(value)[attribute]), ("attribute", name, attribute))
    return ids


def has_identity(value: Any) -> bool:
    """Return whether the identity of a value matters; Python may share equal numbers, strings and tuples.

    Importable functions, classes and modules are the same on both sides anyway.
    """
    if isinstance(value, type | types.FunctionType):
        return value.__module__ == "__main__"
    return not isinstance(value, int | float | complex | str | bytes | tuple | frozenset | types.ModuleType | None)
