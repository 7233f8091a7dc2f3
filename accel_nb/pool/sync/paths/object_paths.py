"""Paths to the objects that a value refers to.

A path is a name and the steps below it, as in ``step@closure:model``. It identifies the same object in kernel and
workers. A model to which only a closure, a bound method or a trainer refers is therefore treated like one that has a
name.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Iterator, Mapping
from typing import Any

from accel_nb.pool.sync.contents.content_kinds import EMPTY_CELL, cell_content, is_set_in_place, is_settable_tensor
from accel_nb.pool.sync.contents.long_items import COMMON_ATOMS, MAX_ITEMS
from accel_nb.pool.sync.contents.object_states import attributes_in_state, has_own_state
from accel_nb.pool.sync.contents.plain_objects import (
    ATOMS,
    is_array,
    is_builtin_method,
    is_known_dict,
    is_pickled_by_value,
    is_plain_object,
)
from accel_nb.pool.sync.objects.class_attributes import class_parts, is_local_class, is_notebook_class
from accel_nb.pool.sync.objects.module_hooks import module_hooks
from accel_nb.pool.sync.objects.object_kinds import (
    attributes_of,
    is_generator,
    is_loader,
    is_module,
    is_optimizer,
    is_scheduler,
    is_tensor,
    is_training_object,
)
from accel_nb.pool.sync.objects.user_attributes import (
    attribute_owner,
    has_tensor_keys,
    optimizer_attributes,
    scheduler_attributes,
    user_attributes,
)
from accel_nb.pool.sync.objects.user_hooks import gradient_hooks
from accel_nb.pool.sync.reductions.iterators import is_generator_iterator, is_loader_iterator
from accel_nb.pool.sync.reductions.loader_state import loader_attributes
from accel_nb.pool.sync.reductions.memory_views import is_whole_view
from accel_nb.pool.sync.reductions.open_files import file_of, is_csv_writer, is_file_object, is_reopenable_file
from accel_nb.runtime.container_items import items_of
from accel_nb.runtime.python_generators import argument_values

MAX_PARTS = 512
"""The most objects of a value that have paths, and the most steps of a path."""

_OWN = "own:"
"""The start of the step to an attribute of a module, its submodules or parameters, of an optimizer or a scheduler."""

_ITEM = "item:"
"""The start of the step to an item of a container, which ends with its number."""

_MISSING = object()
_LOADER_PARTS = frozenset({"dataset", "sampler", "batch_sampler", "collate_fn"})


def root_name(path: str) -> str:
    """Return the name at the start of a path."""
    return path.partition("@")[0]


def attribute_path(path: str, name: str) -> str:
    """Return the path of an attribute of the plain object at ``path``."""
    return f"{path}@attribute:{name}"


def is_at_or_below(path: str, other: str) -> bool:
    """Return whether ``path`` is ``other`` or one below it."""
    return path == other or path.startswith(f"{other}@")


def readable_path(path: str) -> str:
    """Return a path as code would write it: ``trainer.optimizer``, ``models[0]``; items of dicts by their number."""
    name, *steps = path.split("@")
    for step in map(_unquote, steps):
        kind, _, key = step.partition(":")
        name += f"[{key}]" if kind == "item" else f".{key or kind}"
    return name


def resolve_path(namespace: Mapping[str, Any], path: str) -> Any:
    """Return the object at a path; raise LookupError if there is none."""
    name, *steps = path.split("@")
    value = namespace[name]
    for step in map(_unquote, steps):
        if step.startswith(_OWN) and is_module(value):
            value = _module_attribute(value, step.removeprefix(_OWN))
        elif step.startswith(_ITEM) and isinstance(value, list | tuple | dict):
            value = _item(value, int(step.removeprefix(_ITEM)))
        else:
            value = next((child for known, child in _steps(value) if known == step), _MISSING)
        if value is _MISSING:
            raise LookupError(f"nothing is at {path!r} any more")
    return value


def is_below_training_object(path: str) -> bool:
    """Return whether an object is at an attribute of a module, an optimizer or a scheduler, or below one."""
    return f"@{_OWN}" in path


def _quote(step: str) -> str:
    """Return a step without ``@``, which keys of a ModuleDict may contain."""
    return step.replace("%", "%25").replace("@", "%40")


def _unquote(step: str) -> str:
    return step.replace("%40", "@").replace("%25", "%")


def referenced_objects(name: str, value: Any) -> dict[str, Any]:
    """Return by path the mutable objects that a named value refers to, each once, without the value itself."""
    found: dict[str, Any] = {}
    if type(value) in (list, tuple, dict, set) and (len(value) > MAX_ITEMS or _has_only_atoms(value)):
        return found
    seen = {id(value)}
    waiting = [(name, _steps_to_parts(value, seen))]
    while waiting:
        path, steps = waiting[-1]
        step, child = next(steps, ("", None))
        if not step:
            waiting.pop()
            continue
        is_atom = isinstance(child, ATOMS) and not (is_builtin_method(child) or is_local_class(child))
        if is_atom or id(child) in seen or max(len(found), len(waiting)) >= MAX_PARTS:
            continue
        below = f"{path}@{_quote(step)}"
        if is_below_training_object(below) and not _can_change_in_place(child):
            continue  # it is a part of the attribute, not a reason to send the whole model
        if _has_path(child):
            found[below] = child
        elif not (isinstance(child, tuple | memoryview) or is_csv_writer(child)):
            continue
        seen.add(id(child))
        waiting.append((below, _steps_to_parts(child, seen)))
    return found


def _has_only_atoms(value: Any) -> bool:
    items = value.values() if type(value) is dict else value
    return all(type(item) in COMMON_ATOMS for item in items)


def _steps_to_parts(value: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Return the `_steps` of a value; add the parts of a module to ``seen``, since they are compared with it."""
    if is_module(value):
        seen.update(id(part) for part in value.modules())
        seen.update(id(part) for part in (*value.parameters(), *value.buffers()))
    return _steps(value)


def _has_path(value: Any) -> bool:
    """Return whether an object to which a value refers has a path: it changes in place, or refers to what does."""
    if isinstance(value, types.FunctionType):
        return is_pickled_by_value(value)
    if isinstance(value, type):
        return is_local_class(value)
    if is_file_object(value):
        return is_reopenable_file(value)
    return (
        is_set_in_place(value)
        or isinstance(value, dict | types.MethodType | types.CellType)
        or is_builtin_method(value)
        or is_training_object(value)
        or is_generator_iterator(value)
        or is_loader_iterator(value)
    )


def _can_change_in_place(value: Any) -> bool:
    if is_tensor(value):
        return is_settable_tensor(value)
    return not isinstance(value, dict) or is_known_dict(value)


def _steps(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects that a value refers to directly, each with its path step."""
    if isinstance(value, types.FunctionType):
        if not is_pickled_by_value(value):
            return
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            yield f"cell:{name}", cell
            if (content := cell_content(cell)) is not EMPTY_CELL:
                yield f"closure:{name}", content
        yield from ((f"default:{index}", item) for index, item in enumerate(value.__defaults__ or ()))
        yield from ((f"default:{name}", item) for name, item in (value.__kwdefaults__ or {}).items())
        yield from _attributes(value)
    elif is_notebook_class(value):
        yield from class_parts(value)
    elif isinstance(value, types.MethodType):
        yield "self", value.__self__
        yield "function", value.__func__
    elif is_builtin_method(value):
        yield "self", value.__self__
    elif isinstance(value, functools.partial):
        yield "function", value.func
        yield from ((f"argument:{index}", item) for index, item in enumerate(value.args))
        yield from ((f"argument:{name}", item) for name, item in value.keywords.items())
    elif is_generator_iterator(value):
        yield from ((f"argument:{name}", item) for name, item in argument_values(value).items())
    elif isinstance(value, list | tuple | dict):
        yield from ((f"{_ITEM}{index}", item) for index, item in enumerate(items_of(value, MAX_ITEMS)))
    elif is_csv_writer(value):
        yield "file", file_of(value)
    elif isinstance(value, memoryview):
        if is_whole_view(value):
            yield "object", value.obj
    elif is_module(value):
        yield from _hooks(value)
        for path, own in user_attributes(value).items():
            prefix = f"{_OWN}{path}." if path else _OWN
            # An engine moves the ``forward`` of an instance.
            yield from (
                (prefix + name, item) for name, item in own.items() if name.isidentifier() and name != "forward"
            )
    elif is_optimizer(value) or is_scheduler(value):
        own = optimizer_attributes(value) if is_optimizer(value) else scheduler_attributes(value)
        yield from ((_OWN + name, item) for name, item in own.items() if not has_tensor_keys(item))
    elif is_tensor(value):
        yield from _numbered("hook:", gradient_hooks(value))
    elif is_loader(value):
        yield from _loader_parts(value)
    elif is_array(value):
        if value.dtype.hasobject and value.size <= MAX_ITEMS:
            yield from ((f"{_ITEM}{index}", item) for index, item in enumerate(value.flat))
    elif is_plain_object(value) or has_own_state(value):
        yield from _attributes(value)
        if is_local_class(type(value)):
            yield "class", type(value)


def _hooks(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield the user's hooks of a module, of its submodules and of its parameters."""
    yield from ((f"hook:{path}.{name}.{number}", hook) for (path, name, number), hook in module_hooks(module))


def _item(container: Any, number: int) -> Any:
    """Return an item of a list, tuple or dict by its number, as `_steps` counts; there may be hundreds of paths."""
    return next(itertools.islice(items_of(container, MAX_ITEMS), number, None), _MISSING)


def _module_attribute(module: Any, place: str) -> Any:
    path, _, name = place.rpartition(".")
    try:
        return vars(attribute_owner(module, path)).get(name, _MISSING)
    except LookupError:
        return _MISSING


def _numbered(step: str, hooks: Mapping[str, Mapping[int, Any]]) -> Iterator[tuple[str, Any]]:
    for name, hook_dict in hooks.items():
        yield from ((f"{step}{name}.{number}", hook) for number, hook in hook_dict.items())


def _loader_parts(loader: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects that a data loader reads by, without those of an iteration, and the user's attributes."""
    own = loader_attributes(loader)
    for name, item in vars(loader).items():
        if name in _LOADER_PARTS or own.get(name, _MISSING) is item or is_generator(item):
            yield f"attribute:{name}", item


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    own = attributes_in_state(value) if has_own_state(value) else attributes_of(value) or {}
    for name, item in itertools.islice(own.items(), MAX_ITEMS):
        if name.isidentifier():
            yield f"attribute:{name}", item
