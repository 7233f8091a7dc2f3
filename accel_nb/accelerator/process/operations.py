"""Collectives and operations on nested tensors as functions, for scripts without an accelerator.

Each collective works over this process's world, and every rank must call it. `Accelerator` has them as methods.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from accel_nb.errors import MisuseError
from accel_nb.precision.half import cast_half_floats
from accel_nb.runtime.distributed.collectives import Collectives
from accel_nb.runtime.distributed.communicator import Operation
from accel_nb.runtime.distributed.current_world import current_comm
from accel_nb.runtime.tensors.nested import (
    concat_batches,
    find_tensors,
    first_batch_size,
    map_leaves,
    map_tensors,
    to_device,
)

T = TypeVar("T")


def gather(tensor: T) -> T:
    """Return every rank's tensors concatenated along the first dim, in rank order; first dims may differ."""
    return Collectives(current_comm()).gather(tensor)


def gather_object(object: Any) -> list[Any]:
    """Return every rank's value in a list; if all are lists, their items in one list. Nothing is pickled."""
    values = Collectives(current_comm()).gather_objects(object)
    if all(isinstance(item, list) for item in values):
        return [item for items in values for item in items]
    return values


def broadcast(tensor: T, from_process: int = 0) -> T:
    """Return one rank's tensors on every rank; shapes and dtypes must be equal."""
    return Collectives(current_comm()).broadcast(tensor, from_process)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Replace a list's items by the items of one rank's list, in place, and return it."""
    object_list[:] = Collectives(current_comm()).broadcast_object(object_list, from_process)
    return object_list


def reduce(tensor: T, reduction: Operation = "mean", scale: float = 1.0) -> T:
    """Return the mean, sum, maximum or minimum over ranks, times ``scale``; `Accelerator.reduce` sums by default."""
    return Collectives(current_comm()).reduce(tensor, reduction, scale)


def pad_across_processes(tensor: T, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> T:
    """Return tensors padded along ``dim`` to the longest on any rank."""
    return Collectives(current_comm()).pad_across(tensor, dim, pad_index, pad_first=pad_first)


def wait_for_everyone() -> None:
    """Wait until every rank has made this call."""
    Collectives(current_comm()).barrier()


def send_to_device(
    tensor: Any,
    device: torch.device | str | int,
    non_blocking: bool = False,
    skip_keys: Collection[str] | str | None = None,
) -> Any:
    """Return nested tensors on a device; the values of ``skip_keys`` in mappings, at any depth, are not moved.

    An object with a ``to`` method is moved by it as a whole.
    """
    skipped = [skip_keys] if isinstance(skip_keys, str) else skip_keys or ()
    return to_device(tensor, device, non_blocking, skipped)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = lambda value: isinstance(value, Tensor),
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Return ``data`` with ``func(leaf, *args, **kwargs)`` in place of each leaf that ``test_type`` accepts.

    Raises `MisuseError` for any other leaf if ``error_on_other_type``.
    """

    def change(leaf: Any) -> Any:
        if test_type(leaf):
            return func(leaf, *args, **kwargs)
        if error_on_other_type:
            raise MisuseError(f"{getattr(func, '__name__', func)} does not apply to a {type(leaf).__name__}")
        return leaf

    return map_leaves(change, data, is_leaf=test_type)


def concatenate(data: Sequence[T], dim: int = 0) -> T:
    """Return batches of the same structure concatenated along ``dim``, tensor by tensor."""
    if dim == 0:
        return concat_batches(data)
    columns = [list(find_tensors(batch)) for batch in data]
    joined = iter([torch.cat(parts, dim) for parts in zip(*columns, strict=True)])
    return map_tensors(lambda _: next(joined), data[0])


def slice_tensors(data: T, tensor_slice: slice) -> T:
    """Return nested data with each tensor cut along its first dim, whatever its length; other values are unchanged."""
    return map_tensors(lambda tensor: tensor[tensor_slice], data)


def find_batch_size(data: Any) -> int | None:
    """Return the number of samples in a batch; None if nothing in it has a length."""
    return first_batch_size(data)


def find_device(data: Any) -> torch.device | None:
    """Return the device of the first tensor in nested data; None if there is no tensor."""
    return next((tensor.device for tensor in find_tensors(data)), None)


def listify(data: Any) -> Any:
    """Return nested data with each tensor as nested lists of numbers."""
    return map_tensors(lambda tensor: tensor.detach().cpu().tolist(), data)


def convert_to_fp32(tensor: Any) -> Any:
    """Return nested data with each half precision tensor in float32."""
    return cast_half_floats(tensor, torch.float32)


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``model_forward``, and returns half precision tensors of its result in float32."""

    @functools.wraps(model_forward)
    def forward_in_float32(*args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(model_forward(*args, **kwargs))

    return forward_in_float32
