"""Operations on batches: tensors nested in tuples, lists, mappings and dataclasses.

A *batch* is the result of a collate function. A list or tuple whose length is the batch size has one value for each
sample if it contains no array (such as file names) or arrays of other lengths (such as boxes per image). Every other
list or tuple has one item for each field.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeGuard, cast

import numpy as np
import torch
from torch import Tensor

_MISSING = object()


def map_tensors(fn: Callable[[Tensor], Any], nested: Any) -> Any:
    """Return ``nested`` with ``fn`` applied to each tensor; other leaves are unchanged.

    Returns new containers of the same types (a mapping that cannot be copied becomes a dict); nothing is changed in
    place.
    """
    if isinstance(nested, Tensor):
        return fn(nested)
    if type(nested) is tuple:  # a fast path for the batches of most loaders
        return tuple([fn(item) if isinstance(item, Tensor) else map_tensors(fn, item) for item in nested])
    return _map_children(lambda child: map_tensors(fn, child), nested)


def map_leaves(fn: Callable[[Any], Any], nested: Any, *, is_leaf: Callable[[Any], bool]) -> Any:
    """Return ``nested`` with ``fn`` applied to each tensor, other leaf, and value for which ``is_leaf`` is true."""
    if isinstance(nested, Tensor) or is_leaf(nested) or next(_children(nested), _MISSING) is _MISSING:
        return fn(nested)
    return _map_children(lambda child: map_leaves(fn, child, is_leaf=is_leaf), nested)


def to_device(
    nested: Any, device: torch.device | str | int, non_blocking: bool = False, skip_keys: Collection[Any] = ()
) -> Any:
    """Return ``nested`` with each tensor on ``device``; tensors that are there already are not copied.

    An object with a ``to`` method (a packed sequence, a tokenizer's batch) is moved by this method. In other mappings,
    the values of ``skip_keys`` are not moved.
    """

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=non_blocking)

    def move_item(item: Any) -> Any:
        if isinstance(item, Tensor):
            return move(item)
        if _can_move(item):
            try:
                return item.to(device, non_blocking=non_blocking)
            except TypeError:  # a `to` without `non_blocking`
                return item.to(device)
        if skip_keys and isinstance(item, Mapping):
            moved = iter([value if key in skip_keys else move_item(value) for key, value in item.items()])
            return _map_children(lambda _: next(moved), item)
        return _map_children(move_item, item)

    if type(nested) is tuple:
        return tuple([move(item) if isinstance(item, Tensor) else move_item(item) for item in nested])
    return move_item(nested)


def _can_move(item: Any) -> bool:
    # Attributes of a container may be its items, whose lookup raises other errors than AttributeError.
    return not isinstance(item, type) and callable(getattr(type(item) if _is_container(item) else item, "to", None))


def find_tensors(nested: Any) -> Iterator[Tensor]:
    """Yield every tensor in ``nested``, depth first."""
    if isinstance(nested, Tensor):
        yield nested
    else:
        for child in _children(nested):
            yield from find_tensors(child)


def find_leaves(nested: Any) -> Iterator[Any]:
    """Yield every value in ``nested`` that is not a container, depth first; tensors in the order of `find_tensors`."""
    if isinstance(nested, Tensor) or not _is_container(nested):
        yield nested
    else:
        for child in _children(nested):
            yield from find_leaves(child)


def describe(nested: Any, *, any_rows: bool = False) -> str:
    """Return structure, dtypes and shapes as text: ``{'x': float32[3, 2], 'y': (int64[3], None)}``.

    With ``any_rows`` first dims are written as ``*``: ``float32[*, 2]``.
    """
    if isinstance(nested, Tensor):
        shape = ", ".join(map(str, nested.shape)) if not any_rows else _shape_without_rows(tuple(nested.shape))
        return f"{_dtype_name(nested.dtype)}[{shape}]"
    if isinstance(nested, Mapping):
        body = "{" + ", ".join(f"{key!r}: {describe(value, any_rows=any_rows)}" for key, value in nested.items()) + "}"
        return body if type(nested) is dict else f"{type(nested).__name__}({body})"
    if not _is_container(nested):
        return repr(nested) if nested is None else type(nested).__name__
    body = ", ".join([describe(child, any_rows=any_rows) for child in _children(nested)])
    if type(nested) is list:
        return f"[{body}]"
    return f"({body})" if type(nested) is tuple else f"{type(nested).__name__}({body})"


@functools.cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.lru_cache(256)
def _shape_without_rows(shape: tuple[int, ...]) -> str:
    return ", ".join(["*", *map(str, shape[1:])]) if shape else ""


def first_batch_size(nested: Any) -> int | None:
    """Return the number of samples in a batch: the length of the first array's first axis.

    Without an array it is the length of the first list; None if there is neither (such as for a single number).
    """
    array = next(_arrays(nested), None)
    if array is not None:
        return _num_rows(array)
    return _first_length(nested)


def slice_batch(nested: Any, start: int, stop: int) -> Any:
    """Return samples ``start`` to ``stop`` of a batch; tensors are views, not copies.

    Arrays whose first axis does not have the batch size (such as scalars and shared tables) are returned whole.
    """
    size = first_batch_size(nested)
    if size is None:
        return nested
    if type(nested) is tuple and all(
        isinstance(item, Tensor) and item.dim() and _num_rows(item) == size for item in nested
    ):
        return tuple([item[start:stop] for item in nested])

    def cut(item: Any) -> Any:
        if _is_array(item):
            return item[start:stop] if _num_rows(item) == size else item
        if _is_one_per_sample(item, size):
            return item[start:stop]
        return _map_children(cut, item)

    return cut(nested)


def concat_batches(batches: Sequence[Any]) -> Any:
    """Return one batch with the samples of all batches, in order.

    Raises ``ValueError`` if structures, or shapes past the first axis, differ.
    """
    if len(batches) == 1:
        return batches[0]
    sizes = [first_batch_size(batch) for batch in batches]
    if None in sizes:
        raise ValueError("a batch without a first axis cannot be joined with another")
    return _concat(list(batches), cast("list[int]", sizes))


def _concat(items: list[Any], sizes: list[int]) -> Any:
    first = items[0]
    if any(type(item) is not type(first) for item in items):
        raise ValueError("batches of another structure cannot be joined")
    if all(_is_array(item) and _num_rows(item) == size for item, size in zip(items, sizes, strict=True)):
        if len({(item.shape[1:], item.dtype) for item in items}) > 1:
            raise ValueError("arrays of another shape or type cannot be joined")
        return torch.cat(items) if isinstance(first, Tensor) else np.concatenate(items)
    if any(_is_one_per_sample(item, size) for item, size in zip(items, sizes, strict=True)) and all(
        len(item) == size for item, size in zip(items, sizes, strict=True)
    ):
        return _rebuild_sequence(first, [value for item in items for value in item])
    children = [list(_children(item)) for item in items]
    if not children[0]:
        if not all(_equal(first, item) for item in items[1:]):
            raise ValueError("values that belong to no sample differ from batch to batch")
        return first
    keys = [_keys(item) for item in items]
    if any(key != keys[0] for key in keys):
        raise ValueError("batches of another structure cannot be joined")
    joined = iter([_concat(list(column), sizes) for column in zip(*children, strict=True)])
    return _map_children(lambda _: next(joined), first)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    return bool(np.all(one == other))


def _is_array(item: Any) -> TypeGuard[Tensor | np.ndarray]:
    return isinstance(item, Tensor | np.ndarray) and item.ndim > 0


def _num_rows(array: Tensor | np.ndarray) -> int:
    # A nested tensor has no shape, but a size in its first dim.
    return array.size(0) if isinstance(array, Tensor) else array.shape[0]


def _arrays(nested: Any) -> Iterator[Tensor | np.ndarray]:
    if _is_array(nested):
        yield nested
    else:
        for child in _children(nested):
            yield from _arrays(child)


def _first_length(nested: Any) -> int | None:
    if isinstance(nested, list | tuple):
        inner = next((found for child in nested if (found := _first_length(child)) is not None), None)
        return len(nested) if inner is None else inner
    return next((found for child in _children(nested) if (found := _first_length(child)) is not None), None)


def _is_one_per_sample(item: Any, size: int) -> bool:
    if not isinstance(item, list | tuple) or hasattr(item, "_fields") or len(item) != size:
        return False
    # A list of one dict of arrays for each sample (object detection) is per sample: its arrays lack the batch size.
    lengths = [_num_rows(array) for array in _arrays(item)]
    lengths = lengths or [found for child in item if (found := _first_length(child)) is not None]
    return not lengths or any(length != size for length in lengths)


def _children(nested: Any) -> Iterator[Any]:
    if isinstance(nested, Mapping):
        yield from nested.values()
    elif isinstance(nested, list | tuple):
        yield from nested
    elif _is_dataclass(nested):
        yield from (getattr(nested, name) for name in _fields_with_values(nested))


def _is_container(nested: Any) -> bool:
    return isinstance(nested, Mapping | list | tuple) or _is_dataclass(nested)


def _keys(nested: Any) -> list[Any] | int:
    if isinstance(nested, Mapping):
        return list(nested)
    return len(list(_children(nested)))


def _map_children(fn: Callable[[Any], Any], nested: Any) -> Any:
    kind = type(nested)
    if kind is dict:
        return {key: fn(value) for key, value in nested.items()}
    if kind is list:
        return [fn(item) for item in nested]
    if isinstance(nested, list | tuple):
        return _rebuild_sequence(nested, [fn(item) for item in nested])
    if isinstance(nested, Mapping):
        items = {key: fn(value) for key, value in nested.items()}
        return _with_items(nested, items) if isinstance(nested, MutableMapping) else cast(Any, kind)(items)
    if _is_dataclass(nested):
        clone = copy.copy(nested)
        for name in _fields_with_values(nested):
            object.__setattr__(clone, name, fn(getattr(nested, name)))
        return clone
    return nested


def _with_items(nested: MutableMapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return a copy of a mapping with other items; attributes that mirror items are replaced too."""
    try:  # a copy keeps attributes that the constructor does not accept
        clone = copy.copy(nested)
    except TypeError:  # its constructor needs arguments that its copy does not pass
        return items
    if type(nested).__dictoffset__:  # it has attributes
        _replace_attributes(clone, nested, items)
    for key, value in items.items():  # some mappings (model outputs) do not support `update`
        clone[key] = value
    return clone


def _replace_attributes(clone: Any, nested: MutableMapping[Any, Any], items: dict[Any, Any]) -> None:
    before, attributes = vars(nested), vars(clone)
    if before is nested:  # `self.__dict__ = self`
        object.__setattr__(clone, "__dict__", clone)
        return
    replaced = {
        id(value): items[key] for key, value in nested.items() if isinstance(value, Tensor) or _is_container(value)
    }
    for name, value in before.items():
        if id(value) in replaced:
            attributes[name] = replaced[id(value)]
        elif isinstance(value, dict | list) and attributes.get(name) is value:  # it may hold the items
            attributes[name] = copy.copy(value)


def _rebuild_sequence(like: list[Any] | tuple[Any, ...], items: list[Any]) -> Any:
    make = getattr(like, "_make", None)  # a named tuple
    if make is not None:
        return make(items)
    return cast(Any, type(like))(items)


def _fields_with_values(nested: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(nested) if hasattr(nested, field.name)]


def _is_dataclass(nested: Any) -> bool:
    return dataclasses.is_dataclass(nested) and not isinstance(nested, type)
