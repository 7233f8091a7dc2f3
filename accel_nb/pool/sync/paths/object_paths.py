"""Paths to the objects that a value refers to, and how such an object is updated in place.

A path is a name and the steps below it, as in ``step@closure:model``. It identifies the same object on both sides. A
model to which only a closure, a bound method or a trainer refers is therefore treated like one that has a name.
"""

from __future__ import annotations

import functools
import itertools
import sys
import types
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from accel_nb.pool.sync.objects.class_attributes import (
    class_content,
    class_parts,
    is_enum_member,
    is_local_class,
    is_notebook_class,
    set_class_content,
)
from accel_nb.pool.sync.objects.module_hooks import module_hooks
from accel_nb.pool.sync.objects.object_kinds import (
    attributes_of,
    generator_state,
    is_generator,
    is_loader,
    is_module,
    is_optimizer,
    is_scheduler,
    is_sparse,
    is_tensor,
    is_training_object,
    set_attributes,
    set_generator_state,
)
from accel_nb.pool.sync.objects.shared_ids import has_identity
from accel_nb.pool.sync.objects.shared_memory import OwnData, data_of
from accel_nb.pool.sync.objects.user_attributes import (
    attribute_owner,
    has_tensor_keys,
    optimizer_attributes,
    scheduler_attributes,
    set_tensor_attributes,
    tensor_attributes,
    user_attributes,
)
from accel_nb.pool.sync.objects.user_hooks import gradient_hooks
from accel_nb.pool.sync.paths.object_states import ObjectState, has_own_state, object_state, set_object_state
from accel_nb.pool.sync.reductions.custom_operators import is_custom_operator
from accel_nb.pool.sync.reductions.iterators import (
    is_generator_iterator,
    is_iterator,
    is_loader_iterator,
    is_plain_iterator,
)
from accel_nb.pool.sync.reductions.loader_state import loader_attributes, set_loader_attributes
from accel_nb.pool.sync.reductions.locks import is_lock
from accel_nb.pool.sync.reductions.memory_views import is_whole_view
from accel_nb.pool.sync.reductions.open_files import (
    FilePosition,
    file_content,
    file_of,
    is_csv_writer,
    is_file,
    set_position,
)
from accel_nb.pool.sync.reductions.process_objects import is_of_process
from accel_nb.pool.sync.reductions.weak_collections import is_weak_collection
from accel_nb.runtime.container_items import items_of
from accel_nb.runtime.generators import argument_values
from accel_nb.runtime.tensors.overlap import overwrite

MAX_ITEMS = 128
"""The items of containers with more have no paths (`accel_nb.pool.sync.long_containers`)."""
MAX_PARTS = 512
MAX_COUNTED = 100_000
"""Of a container with more items than these, the items have no identity on the other side."""

_OWN = "own:"
"""The start of the step to an attribute of a module, its submodules or parameters, of an optimizer or a scheduler."""

_ITEM = "item:"
"""The start of the step to an item of a container, which ends with its number."""

_MISSING = object()
_DICTS = (dict, OrderedDict, defaultdict, Counter)
_LOADER_PARTS = frozenset({"dataset", "sampler", "batch_sampler", "collate_fn"})
_COMMON = frozenset({int, float, str, bool, type(None), bytes})
_ATOMS = (str, int, float, complex, bytes, type(None), type, types.ModuleType, types.BuiltinFunctionType)
_HOLDERS = (list, tuple, dict, set, deque, bytearray, array, memoryview)
_NEVER_WHOLE = (*_ATOMS, types.FunctionType, types.MethodType, types.CellType, list, set, deque, bytearray, array)


@dataclass(frozen=True, slots=True)
class ObjectAttributes:
    """The attributes of an object, without those that are ``left_out``; if not complete, only some of them."""

    values: dict[str, Any]
    is_complete: bool = True
    left_out: frozenset[str] = frozenset()
    """The names of attributes that cannot be copied."""


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
    for step in steps:
        kind, _, key = step.partition(":")
        name += f"[{key}]" if kind == "item" else f".{key or kind}"
    return name


def resolve_path(namespace: Mapping[str, Any], path: str) -> Any:
    """Return the object at a path; raise LookupError if there is none."""
    name, *steps = path.split("@")
    value = namespace[name]
    for step in steps:
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


def referenced_objects(name: str, value: Any) -> dict[str, Any]:
    """Return by path the mutable objects that a named value refers to, each once, without the value itself."""
    found: dict[str, Any] = {}
    if type(value) in (list, tuple, dict, set) and (len(value) > MAX_ITEMS or _has_only_atoms(value)):
        return found
    _collect_objects(name, value, {id(value)}, found)
    return found


def _has_only_atoms(value: Any) -> bool:
    items = value.values() if type(value) is dict else value
    return all(type(item) in _COMMON for item in items)


def _collect_objects(path: str, value: Any, seen: set[int], found: dict[str, Any]) -> None:
    if is_module(value):
        seen.update(id(part) for part in value.modules())
        seen.update(id(part) for part in (*value.parameters(), *value.buffers()))
    for step, child in _steps(value):
        is_atom = isinstance(child, _ATOMS) and not (_is_builtin_method(child) or is_local_class(child))
        if is_atom or id(child) in seen or len(found) >= MAX_PARTS:
            continue
        below = f"{path}@{step}"
        if is_below_training_object(below) and not _can_change_in_place(child):
            continue  # it is a part of the attribute, not a reason to send the whole model
        seen.add(id(child))
        if any(is_kind(child) for is_kind in _CHANGED_IN_PLACE):
            found[below] = child
            _collect_objects(below, child, seen, found)
        elif isinstance(child, _HOLDERS) or is_csv_writer(child):
            if not (isinstance(child, tuple | memoryview) or is_csv_writer(child)):
                found[below] = child
            _collect_objects(below, child, seen, found)
        elif has_references(child) or has_own_state(child) or is_local_class(child):
            found[below] = child
            _collect_objects(below, child, seen, found)


def _can_change_in_place(value: Any) -> bool:
    if is_tensor(value):
        return value.is_leaf and (type(value).__module__.partition(".")[0] == "torch" or _is_usual_tensor(value))
    return not isinstance(value, dict) or _is_known_dict(type(value))


def _is_usual_tensor(value: Any) -> bool:
    """Return whether a leaf that requires gradients holds its data itself, as weights of the user's own class do."""
    usual = sys.modules["torch"].Tensor.__torch_dispatch__
    return value.requires_grad and type(value).__torch_dispatch__ is usual


def _data_of_leaf(value: Any) -> Any:
    """Return the data of a leaf, without the user's own class."""
    data, plain = value.detach(), sys.modules["torch"].Tensor
    return data.as_subclass(plain) if type(data) is not plain and _is_usual_tensor(value) else data


def _is_known_dict(kind: type) -> bool:
    """Return whether a class of dicts is copied by its items and attributes."""
    is_usual = kind.__reduce_ex__ is object.__reduce_ex__ and any(kind.__reduce__ is base.__reduce__ for base in _DICTS)
    return is_usual or kind.__module__ == "__main__"


def _steps(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects that a value refers to directly, each with its path step."""
    if isinstance(value, types.FunctionType):
        if not _is_pickled_by_value(value):
            return
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            yield f"cell:{name}", cell
            if (content := _cell_content(cell)) is not _MISSING:
                yield f"closure:{name}", content
        yield from ((f"default:{index}", item) for index, item in enumerate(value.__defaults__ or ()))
        yield from ((f"default:{name}", item) for name, item in (value.__kwdefaults__ or {}).items())
        yield from _attributes(value)
    elif is_notebook_class(value):
        yield from class_parts(value)
    elif isinstance(value, types.MethodType):
        yield "self", value.__self__
        yield "function", value.__func__
    elif _is_builtin_method(value):
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
            yield from ((prefix + name, item) for name, item in own.items() if name.isidentifier())
    elif is_optimizer(value) or is_scheduler(value):
        own = optimizer_attributes(value) if is_optimizer(value) else scheduler_attributes(value)
        yield from ((_OWN + name, item) for name, item in own.items() if not has_tensor_keys(item))
    elif is_tensor(value):
        yield from _numbered("hook:", gradient_hooks(value))
    elif is_loader(value):
        yield from _loader_parts(value)
    elif _is_array(value):
        if value.dtype.hasobject and value.size <= MAX_ITEMS:
            yield from ((f"{_ITEM}{index}", item) for index, item in enumerate(value.flat))
    elif is_plain_object(value):
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
    for name, held in hooks.items():
        yield from ((f"{step}{name}.{number}", hook) for number, hook in held.items())


def _loader_parts(loader: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects that a data loader reads by, without those of an iteration, and the user's attributes."""
    own = loader_attributes(loader)
    for name, item in vars(loader).items():
        if name in _LOADER_PARTS or own.get(name, _MISSING) is item or is_generator(item):
            yield f"attribute:{name}", item


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    for name, item in itertools.islice((attributes_of(value) or {}).items(), MAX_ITEMS):
        if name.isidentifier():
            yield f"attribute:{name}", item


def has_references(value: Any) -> bool:
    """Return whether the value is the notebook's function, a bound method, a partial or a plain object.

    A function without a closure may have an attribute after the next cell.
    """
    if isinstance(value, types.FunctionType):
        return _is_pickled_by_value(value)
    is_bound = isinstance(value, types.MethodType | functools.partial) or _is_builtin_method(value)
    return is_bound or is_plain_object(value)


def is_plain_object(value: Any) -> bool:
    """Return whether a value is defined by its attributes: these are what pickle would save.

    So is a member of an enumeration, which pickle saves by its value. What the class's ``__setstate__`` does to
    attributes that arrive is not needed: they are those of the other side.
    """
    kind = type(value)
    if is_enum_member(value):
        return not isinstance(value, _ATOMS)
    return (
        attributes_of(value) is not None
        and not isinstance(value, _ATOMS)
        and not is_of_process(value)
        and not is_weak_collection(value)
        and not isinstance(value, types.FunctionType | types.MethodType | functools.partial | list | tuple | dict | set)
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__reduce__ in (object.__reduce__, types.SimpleNamespace.__reduce__)
        and _has_usual_state(kind)
        and not hasattr(kind, "__getnewargs__")
        and not hasattr(kind, "__getnewargs_ex__")
        and not is_training_object(value)
        and not is_loader(value)
        and not is_tensor(value)
        and not is_custom_operator(value)
    )


def _has_usual_state(kind: type) -> bool:
    """Return whether the state of a class's objects are their attributes, as it is of frozen dataclasses with slots."""
    own = getattr(kind, "__getstate__", None)
    return own is getattr(object, "__getstate__", None) or getattr(own, "__module__", None) == "dataclasses"


def _is_builtin_method(value: Any) -> bool:
    """Return whether a value is a method of an object of a built-in type, such as the ``append`` of a list."""
    return isinstance(value, types.BuiltinMethodType | types.MethodWrapperType) and not isinstance(
        value.__self__, types.ModuleType | type | None
    )


def is_replaced_whole(value: Any) -> bool:
    """Return whether the other side gets a new object when this one changes, so that what refers to it is sent too."""
    return (
        has_identity(value)
        and not isinstance(value, _NEVER_WHOLE)
        and (is_plain_iterator(value) or not is_iterator(value))
        and not is_training_object(value)
        and not any(is_kind(value) for is_kind in _CHANGED_IN_PLACE)
        and not (isinstance(value, dict) and _is_known_dict(type(value)))
        and not has_references(value)
        and not has_own_state(value)
        and not is_of_process(value)
    )


def _is_pickled_by_value(function: types.FunctionType) -> bool:
    return function.__module__ == "__main__" or "<" in function.__qualname__


def _cell_content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is empty
        return _MISSING


def _is_cell(value: Any) -> bool:
    return isinstance(value, types.CellType)


def _layout(tensor: Any) -> tuple[Any, ...]:
    """Return the layout and the shape of a sparse tensor, and that of its values if a copy keeps it; none of others."""
    if not is_sparse(tensor):
        return ()
    name = str(tensor.layout)
    return (name, tensor.shape) if name == "torch.sparse_coo" else (name, tensor.shape, tensor.values().shape)


def changeable_items(container: Any) -> list[Any]:
    """Return the items of a container that has more than `MAX_ITEMS` which `content_of` and `set_content` may take.

    Those in tuples come after those of the container itself. None are returned if there are more than `MAX_COUNTED`.
    """
    base: Any = next((kind for kind in (list, dict, deque) if isinstance(container, kind)), None)
    if base is None or base.__len__(container) <= MAX_ITEMS:  # a subclass may define another length
        return []
    found: list[Any] = []
    level = list(items_of(container, sys.maxsize))
    while level:
        samples = {type(item): item for item in level}
        kinds = {kind for kind, item in samples.items() if kind not in _COMMON and _is_changeable(item)}
        if kinds:
            found += [item for item in level if type(item) in kinds]
        tuples = {kind for kind in samples if issubclass(kind, tuple)}
        level = [part for item in level if type(item) in tuples for part in tuple.__iter__(item)] if tuples else []
    return found if len(found) <= MAX_COUNTED else []


def _is_changeable(value: Any) -> bool:
    if type(value) in (list, set, deque, bytearray) or is_tensor(value) or _is_array(value):
        return True
    return (isinstance(value, dict) and _is_known_dict(type(value))) or (
        is_plain_object(value) and not is_enum_member(value)
    )


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _is_masked(array: Any) -> bool:
    masked = sys.modules.get("numpy.ma")
    return masked is not None and isinstance(array, masked.MaskedArray)


_CHANGED_IN_PLACE = (
    *(is_training_object, is_tensor, is_generator, is_loader, _is_array, _is_cell),
    *(is_generator_iterator, is_loader_iterator, is_file, is_lock),
)


def content_of(value: Any) -> tuple[Any, Any] | None:
    """Return ``(kind, content)`` of a value that `set_content` can update in place; None for any other.

    The content is a new shallow copy: when it is pickled, it refers to shared objects but not to the value itself. An
    object of the same kind on the other side can be updated with it. Of a loader it is the user's attributes.
    """
    kind = type(value)
    if is_file(value):
        return file_content(value)
    if is_generator(value):
        return (kind, str(getattr(value, "device", ""))), generator_state(value)
    attributes = attributes_of(value)
    own = None if attributes is None else dict(attributes)
    if isinstance(value, types.FunctionType):
        if not has_references(value):
            return None
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        inside = {name: held for name, cell in cells if (held := _cell_content(cell)) is not _MISSING}
        return "function", (inside, value.__defaults__, value.__kwdefaults__, own)
    if is_notebook_class(value):
        defined = class_content(value)
        return None if defined is None else ("class", defined)
    if isinstance(value, functools.partial):
        return "partial", (value.func, value.args, dict(value.keywords), own)
    if is_tensor(value):
        if not _can_change_in_place(value):
            return None
        return ("tensor", str(value.dtype), *_layout(value)), (
            OwnData(_data_of_leaf(value)),
            value.requires_grad,
            value.grad,
            tensor_attributes(value),
        )
    if _is_array(value):
        plain = sys.modules["numpy"].ndarray
        mask = (value.mask.copy(), value.fill_value) if _is_masked(value) else None
        return ("array", kind, value.shape, str(value.dtype)), (OwnData(value.view(plain)), mask)
    if isinstance(value, list):
        return kind, (list(value), own)
    if isinstance(value, set):
        return kind, (set(value), own)
    if isinstance(value, bytearray):
        return kind, (bytes(value), own)
    if isinstance(value, array):
        return (kind, value.typecode), (value[:], own)
    if isinstance(value, deque):
        return (kind, value.maxlen), (list(value), own)
    if isinstance(value, dict) and _is_known_dict(kind):
        return kind, (list(value.items()), value.default_factory if isinstance(value, defaultdict) else None, own)
    if is_plain_object(value):
        return kind, ObjectAttributes(own or {})
    if is_lock(value):  # it stays the notebook's, which threads there may have
        return kind, ObjectAttributes({}, is_complete=False)
    if is_loader(value):
        return "loader", ObjectAttributes(loader_attributes(value), is_complete=False)
    if has_own_state(value) and not is_training_object(value):
        with suppress(Exception):  # the user's code may raise anything
            return kind, object_state(value)
    return None


def set_content(value: Any, content: Any) -> None:
    """Set the content of a value to one that `content_of` returned for another value of the same kind."""
    if isinstance(value, types.FunctionType):
        inside, value.__defaults__, value.__kwdefaults__, own = content
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            if name in inside:
                cell.cell_contents = inside[name]
        _set_attributes(value, own)
    elif is_notebook_class(value):
        set_class_content(value, content)
    elif isinstance(content, FilePosition):
        set_position(value, content)
    elif is_generator(value):
        set_generator_state(value, content)
    elif isinstance(value, functools.partial):
        value.__setstate__(content)  # type: ignore[attr-defined]
    elif is_tensor(value):
        data, requires_grad, gradient, own = content
        if is_sparse(value):
            with sys.modules["torch"].no_grad():
                value.copy_(data_of(data))
        elif value.shape == data_of(data).shape:
            overwrite(value.data, data_of(data))
        else:
            value.data = data_of(data)
        if value.is_floating_point() or value.is_complex():
            value.requires_grad_(requires_grad)
        value.grad = gradient
        set_tensor_attributes(value, own)
    elif _is_array(value):
        data, mask = content
        value.view(sys.modules["numpy"].ndarray)[...] = data_of(data)
        if mask is not None:
            value.mask, value.fill_value = mask
    elif isinstance(value, list):
        items, own = content
        list.__setitem__(value, slice(None), items)  # not the methods of a subclass: what they do has been done
        _set_attributes(value, own)
    elif isinstance(value, bytearray | array):
        value[:], own = content
        _set_attributes(value, own)
    elif isinstance(value, set):
        items, own = content
        set.clear(value)
        set.update(value, items)
        _set_attributes(value, own)
    elif isinstance(value, deque):
        items, own = content
        deque.clear(value)
        deque.extend(value, items)
        _set_attributes(value, own)
    elif isinstance(value, dict):
        items, factory, own = content
        base: Any = OrderedDict if isinstance(value, OrderedDict) else dict
        base.clear(value)
        for key, item in items:
            base.__setitem__(value, key, item)
        if isinstance(value, defaultdict):
            value.default_factory = factory
        _set_attributes(value, own)
    elif isinstance(content, ObjectState):
        set_object_state(value, content)
    elif is_loader(value):
        set_loader_attributes(value, content.values)
    else:
        set_attributes(value, content.values, is_complete=content.is_complete)


def _set_attributes(value: Any, own: Mapping[str, Any] | None) -> None:
    if own is not None:
        set_attributes(value, own)


def set_attribute(owner: Any, name: str, value: Any) -> None:
    """Set an attribute; an existing container or tensor is updated in place, so that references to it stay valid."""
    current = vars(owner).get(name)
    if current is value:
        return
    old, new = content_of(current), content_of(value)
    if old is not None and new is not None and old[0] == new[0]:
        set_content(current, new[1])
    else:
        setattr(owner, name, value)
