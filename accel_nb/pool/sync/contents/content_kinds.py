"""The kinds of objects whose content is set in place in the receiving process, and how it is read and set.

References to such an object stay valid. Other objects that change are replaced by new ones.
"""

from __future__ import annotations

import functools
import sys
import types
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from accel_nb.pool.sync.contents.object_states import has_own_state, object_state, set_object_state
from accel_nb.pool.sync.contents.plain_objects import (
    ATOMIC_TYPES,
    is_array,
    is_builtin_method,
    is_known_dict,
    is_pickled_by_value,
    is_plain_object,
)
from accel_nb.pool.sync.objects.class_attributes import class_content, is_notebook_class, set_class_content
from accel_nb.pool.sync.objects.object_kinds import (
    attributes_of,
    generator_state,
    is_generator,
    is_loader,
    is_sparse,
    is_tensor,
    is_training_object,
    set_attributes,
    set_generator_state,
)
from accel_nb.pool.sync.objects.shared_ids import has_identity
from accel_nb.pool.sync.objects.shared_memory import OwnData, data_of
from accel_nb.pool.sync.objects.user_attributes import set_tensor_attributes, tensor_attributes
from accel_nb.pool.sync.objects.user_hooks import is_hook_handle
from accel_nb.pool.sync.reductions.iterators import is_iterator, is_plain_iterator
from accel_nb.pool.sync.reductions.loader_state import loader_attributes, set_loader_attributes
from accel_nb.pool.sync.reductions.locks import is_lock
from accel_nb.pool.sync.reductions.open_files import (
    file_kind_and_position,
    is_file_object,
    is_reopenable_file,
    set_position,
)
from accel_nb.pool.sync.reductions.process_objects import is_of_process
from accel_nb.runtime.distributed import sharded
from accel_nb.runtime.distributed.held_gradients import gradient_of, set_gradient
from accel_nb.runtime.leaf_tensors import is_leaf
from accel_nb.runtime.tensors.overlap import overwrite

EMPTY_CELL = object()
"""The value that `cell_content` returns for a closure cell that is not filled yet."""


@dataclass(frozen=True, slots=True)
class ContentKind:
    """A kind of objects whose content is set in place."""

    matches: Callable[[Any], bool]
    read: Callable[[Any], tuple[Any, Any] | None]
    """Return ``(kind, content)`` of an object: the kind must be equal in both processes; None if it cannot be read."""
    write: Callable[[Any, Any], None]


@dataclass(frozen=True, slots=True)
class ObjectAttributes:
    """The attributes of an object, without those that are ``left_out``; if not complete, only some of them."""

    values: dict[str, Any]
    is_complete: bool = True
    left_out: frozenset[str] = frozenset()
    """The names of attributes that cannot be copied."""


def content_of(value: Any) -> tuple[Any, Any] | None:
    """Return ``(kind, content)`` of a value that `set_content` can update in place; None for any other.

    The content is a new shallow copy: when it is pickled, it refers to shared objects but not to the value itself. An
    object of the same kind in the receiving process can be updated with it. Of a loader it is the user's attributes.
    """
    kind = _kind_of(value)
    return None if kind is None else kind.read(value)


def set_content(value: Any, content: Any) -> None:
    """Set the content of a value to one that `content_of` returned for another value of the same kind."""
    kind = _kind_of(value)
    if kind is None:
        raise TypeError(f"the content of an object of {type(value).__qualname__} cannot be set in place")
    kind.write(value, content)


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


def is_set_in_place(value: Any) -> bool:
    """Return whether a value is of a kind whose content is set in place, also if this one's cannot be read."""
    return _kind_of(value) is not None


def is_replaced_whole(value: Any) -> bool:
    """Return whether the receiver gets a new object when this one changes, so that what refers to it is sent too."""
    return (
        has_identity(value)
        and not isinstance(value, (*ATOMIC_TYPES, types.MethodType, types.CellType))
        and not is_set_in_place(value)
        and (is_plain_iterator(value) or not is_iterator(value))
        and not is_builtin_method(value)
        and not is_training_object(value)
        and not is_of_process(value)
    )


def cell_content(cell: types.CellType) -> Any:
    """Return the value in a closure cell."""
    try:
        return cell.cell_contents
    except ValueError:
        return EMPTY_CELL


def _kind_of(value: Any) -> ContentKind | None:
    return next((kind for kind in _KINDS if kind.matches(value)), None)


def _own(value: Any) -> dict[str, Any] | None:
    attributes = attributes_of(value)
    return None if attributes is None else dict(attributes)


def _set_own(value: Any, own: Mapping[str, Any] | None) -> None:
    if own is not None:
        set_attributes(value, own)


def _is_instance(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


# --- containers: by the methods of the base class; those of a subclass have had their effects in the sender --------


def _read_list(value: list[Any]) -> tuple[Any, Any]:
    return type(value), (list(value), _own(value))


def _write_list(value: list[Any], content: Any) -> None:
    items, own = content
    list.__setitem__(value, slice(None), items)
    _set_own(value, own)


def _read_dict(value: dict[Any, Any]) -> tuple[Any, Any]:
    factory = value.default_factory if isinstance(value, defaultdict) else None
    return type(value), (list(value.items()), factory, _own(value))


def _write_dict(value: dict[Any, Any], content: Any) -> None:
    items, factory, own = content
    base: Any = OrderedDict if isinstance(value, OrderedDict) else dict
    base.clear(value)
    for key, item in items:
        base.__setitem__(value, key, item)
    if isinstance(value, defaultdict):
        value.default_factory = factory
    _set_own(value, own)


def _read_set(value: set[Any]) -> tuple[Any, Any]:
    return type(value), (set(value), _own(value))


def _write_set(value: set[Any], content: Any) -> None:
    items, own = content
    set.clear(value)
    set.update(value, items)
    _set_own(value, own)


def _read_deque(value: deque[Any]) -> tuple[Any, Any]:
    return (type(value), value.maxlen), (list(value), _own(value))


def _write_deque(value: deque[Any], content: Any) -> None:
    items, own = content
    deque.clear(value)
    deque.extend(value, items)
    _set_own(value, own)


def _read_bytes(value: bytearray) -> tuple[Any, Any]:
    return type(value), (bytes(value), _own(value))


def _read_numbers(value: array[Any]) -> tuple[Any, Any]:
    return (type(value), value.typecode), (value[:], _own(value))


def _write_sequence(value: Any, content: Any) -> None:
    value[:], own = content
    _set_own(value, own)


# --- tensors and arrays -----------------------------------------------------------------------------------------------


def is_settable_tensor(tensor: Any) -> bool:
    """Return whether the data of a tensor can be set in place: it is the result of no operation with a gradient."""
    return is_leaf(tensor) and (type(tensor).__module__.partition(".")[0] == "torch" or _is_weight(tensor))


def _is_weight(tensor: Any) -> bool:
    """Return whether a leaf requires gradients and owns its storage, as weights of a user's tensor subclass do."""
    usual = sys.modules["torch"].Tensor.__torch_dispatch__
    return tensor.requires_grad and type(tensor).__torch_dispatch__ is usual


def _read_tensor(value: Any) -> tuple[Any, Any] | None:
    if not is_settable_tensor(value):
        return None
    # All ranks gather a sharded tensor by its identity.
    data, plain = value if sharded.is_sharded(value) else value.detach(), sys.modules["torch"].Tensor
    if type(data) is not plain and _is_weight(value):  # of the user's own class
        data = data.as_subclass(plain)
    content = OwnData(data), value.requires_grad, gradient_of(value), tensor_attributes(value)
    return ("tensor", str(value.dtype), *_layout(value)), content


def _layout(tensor: Any) -> tuple[Any, ...]:
    """Return the layout and the shape of a sparse tensor, and that of its values if a copy keeps it; none of others."""
    if not is_sparse(tensor):
        return ()
    name = str(tensor.layout)
    return (name, tensor.shape) if name == "torch.sparse_coo" else (name, tensor.shape, tensor.values().shape)


def _write_tensor(value: Any, content: Any) -> None:
    data, requires_grad, gradient, own = content
    if sharded.is_sharded(value):
        sharded.copy_into(value, data_of(data))
    elif is_sparse(value):
        with sys.modules["torch"].no_grad():
            value.copy_(data_of(data))
    elif value.shape == data_of(data).shape:
        overwrite(value.data, data_of(data))
    else:
        value.data = data_of(data)
    if value.is_floating_point() or value.is_complex():
        value.requires_grad_(requires_grad)
    set_gradient(value, gradient)
    set_tensor_attributes(value, own)


def _read_array(value: Any) -> tuple[Any, Any]:
    plain, masked = sys.modules["numpy"].ndarray, sys.modules.get("numpy.ma")
    is_masked = masked is not None and isinstance(value, masked.MaskedArray)
    mask = (value.mask.copy(), value.fill_value) if is_masked else None
    return ("array", type(value), value.shape, str(value.dtype)), (OwnData(value.view(plain)), mask)


def _write_array(value: Any, content: Any) -> None:
    data, mask = content
    value.view(sys.modules["numpy"].ndarray)[...] = data_of(data)
    if mask is not None:
        value.mask, value.fill_value = mask


# --- code -------------------------------------------------------------------------------------------------------------


def _read_function(value: types.FunctionType) -> tuple[Any, Any] | None:
    if not is_pickled_by_value(value):
        return None
    cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
    inside = {name: inner for name, cell in cells if (inner := cell_content(cell)) is not EMPTY_CELL}
    return "function", (inside, value.__defaults__, value.__kwdefaults__, _own(value))


def _write_function(value: types.FunctionType, content: Any) -> None:
    inside, value.__defaults__, value.__kwdefaults__, own = content
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        if name in inside:
            cell.cell_contents = inside[name]
    _set_own(value, own)


def _read_class(value: type) -> tuple[Any, Any] | None:
    defined = class_content(value)
    return None if defined is None else ("class", defined)


def _read_partial(value: functools.partial[Any]) -> tuple[Any, Any]:
    return "partial", (value.func, value.args, dict(value.keywords), _own(value))


def _write_partial(value: Any, content: Any) -> None:
    value.__setstate__(content)


# --- other objects ----------------------------------------------------------------------------------------------------


def _read_file(value: Any) -> tuple[Any, Any] | None:
    return file_kind_and_position(value) if is_reopenable_file(value) else None


def _read_generator(value: Any) -> tuple[Any, Any]:
    return (type(value), str(getattr(value, "device", ""))), generator_state(value)


def _read_object(value: Any) -> tuple[Any, Any]:
    return type(value), ObjectAttributes(_own(value) or {})


def _write_object(value: Any, content: ObjectAttributes) -> None:
    set_attributes(value, content.values, is_complete=content.is_complete)


def _read_nothing(value: Any) -> tuple[Any, Any]:
    """Read nothing: a lock may be held by threads of the notebook, and the handle of a hook refers to the same hook."""
    return type(value), ObjectAttributes({}, is_complete=False)


def _read_loader(value: Any) -> tuple[Any, Any]:
    return "loader", ObjectAttributes(loader_attributes(value), is_complete=False)


def _write_loader(value: Any, content: ObjectAttributes) -> None:
    set_loader_attributes(value, content.values)


def _is_bare(value: Any) -> bool:
    """Return whether a value has no content but its identity, as an ``object()`` that code uses as a marker."""
    return type(value) is object


def _read_bare(value: Any) -> tuple[Any, Any]:
    return object, None


def _write_bare(value: Any, content: Any) -> None:
    """Change nothing: there is nothing in the object."""


def _has_own_state(value: Any) -> bool:
    return has_own_state(value) and not is_training_object(value)


def _read_state(value: Any) -> tuple[Any, Any] | None:
    with suppress(Exception):  # the user's code may raise anything
        return type(value), object_state(value)
    return None


_KINDS = (
    ContentKind(_is_instance(list), _read_list, _write_list),
    ContentKind(is_known_dict, _read_dict, _write_dict),
    ContentKind(_is_instance(set), _read_set, _write_set),
    ContentKind(is_tensor, _read_tensor, _write_tensor),
    ContentKind(is_array, _read_array, _write_array),
    ContentKind(_is_instance(types.FunctionType), _read_function, _write_function),
    ContentKind(is_notebook_class, _read_class, set_class_content),
    ContentKind(_is_instance(functools.partial), _read_partial, _write_partial),
    ContentKind(_is_instance(deque), _read_deque, _write_deque),
    ContentKind(_is_instance(bytearray), _read_bytes, _write_sequence),
    ContentKind(_is_instance(array), _read_numbers, _write_sequence),
    ContentKind(is_file_object, _read_file, set_position),
    ContentKind(is_generator, _read_generator, set_generator_state),
    ContentKind(is_loader, _read_loader, _write_loader),
    ContentKind(is_plain_object, _read_object, _write_object),
    ContentKind(is_lock, _read_nothing, _write_object),
    ContentKind(is_hook_handle, _read_nothing, _write_object),
    ContentKind(_is_bare, _read_bare, _write_bare),
    ContentKind(_has_own_state, _read_state, set_object_state),
)
"""All kinds; the kind of a value is the first that matches."""
