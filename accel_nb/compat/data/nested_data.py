"""Functions for nested tensors whose results or errors in accelerate differ from those of accel_nb."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accel_nb.accelerator.process import operations
from accel_nb.compat.states import PartialState
from accel_nb.errors import MisuseError, RankMismatchError
from accel_nb.runtime.distributed.collectives import Collectives
from accel_nb.runtime.distributed.communicator import Operation
from accel_nb.runtime.distributed.current_world import current_comm, current_world
from accel_nb.runtime.tensors.nested import find_tensors


class CannotPadNestedTensorWarning(UserWarning):
    """A nested tensor was not padded."""


DistributedOperationException = RankMismatchError


@dataclass
class TensorInformation:
    """Shape and dtype of a tensor."""

    shape: torch.Size
    dtype: torch.dtype


def is_tensor_information(tensor_info: object) -> bool:
    """Return whether a value is a `TensorInformation`."""
    return isinstance(tensor_info, TensorInformation)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = lambda value: isinstance(value, Tensor),
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Return ``data`` with ``func(leaf, ...)`` for each leaf that ``test_type`` accepts; raise TypeError for others."""
    try:
        return operations.recursively_apply(
            func, data, *args, test_type=test_type, error_on_other_type=error_on_other_type, **kwargs
        )
    except MisuseError as error:
        raise TypeError(str(error)) from None


def get_data_structure(data: Any) -> Any:
    """Return nested data with each tensor's shape and dtype in its place."""
    return recursively_apply(lambda tensor: TensorInformation(tensor.shape, tensor.dtype), data)


def get_shape(data: Any) -> Any:
    """Return nested data with each tensor's shape, as a list, in its place."""
    return recursively_apply(lambda tensor: list(tensor.shape), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Return empty tensors of the structure that `get_data_structure` has described."""
    return operations.recursively_apply(
        lambda info: torch.empty(*info.shape, dtype=info.dtype, device="cpu"),
        data_structure,
        test_type=is_tensor_information,
    )


def slice_tensors(
    data: Any, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """Return a batch with each tensor cut along its first dim; the slice is the one of this process."""
    return operations.slice_tensors(data, tensor_slice)


def gather(tensor: Any) -> Any:
    """Return all ranks' tensors, concatenated along the first dim; those of a single rank unchanged."""
    return tensor if current_world().size == 1 else operations.gather(tensor)


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Return one rank's tensors on every rank; the state's ``debug`` checks that shapes are equal."""
    return _collectives().broadcast(tensor, from_process)


def reduce(tensor: Any, reduction: Operation = "mean", scale: float = 1.0) -> Any:
    """Return the mean or sum over ranks, times ``scale``; the state's ``debug`` checks that shapes are equal."""
    return _collectives().reduce(tensor, reduction, scale)


def gather_object(object: Any) -> Any:
    """Return the items of all ranks' values in one list, or the values if one has no items.

    One process gets its own value back. Nothing is pickled; see `accel_nb.Accelerator.gather_object`.
    """
    values = _collectives().gather_objects(object)
    if len(values) == 1:
        return object
    return [item for value in values for item in value] if all(isinstance(v, Iterable) for v in values) else values


def _collectives() -> Collectives:
    """Return collectives over this process's world, which check calls if the shared state's ``debug`` is set."""
    return Collectives(current_comm(), verify=bool(PartialState._shared_state.get("debug")))


def gather_tensor_shape(tensor: Any) -> Tensor:
    """Return the shapes of all ranks' tensors, as rows of one tensor padded by -1."""
    shapes = operations.gather_object([list(tensor.shape)])
    width = max(len(shape) for shape in shapes)
    return torch.tensor([[*shape, *[-1] * (width - len(shape))] for shape in shapes], device="cpu")


def ignorant_find_batch_size(data: Any) -> int | None:
    """Return the number of samples in a batch; None if it has no tensors."""
    return operations.find_batch_size(data)


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Return batches of one structure joined along ``dim``, one batch unchanged; raise TypeError for other leaves."""
    if len(data) == 1:
        return data[0]
    first = data[0]
    if isinstance(first, tuple | list):
        columns = [concatenate([batch[at] for batch in data], dim) for at in range(len(first))]
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    if isinstance(first, Mapping):
        joined = {key: concatenate([batch[key] for batch in data], dim) for key in first}
        return type(first)(joined)  # pyright: ignore[reportCallIssue]
    if not isinstance(first, Tensor):
        raise TypeError(f"batches are joined tensor by tensor, and one has a {type(first).__name__}")
    return torch.cat(list(data), dim)


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Return nested tensors with the last row repeated until all processes can get equally many rows."""
    missing = -batch_size % num_processes

    def padded(value: Tensor) -> Tensor:
        if not missing or value.shape[dim] != batch_size:
            return value
        last = value.narrow(dim, value.shape[dim] - 1, 1)
        return torch.cat([value, *[last] * missing], dim)

    return recursively_apply(padded, tensor, error_on_other_type=True)


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """Return tensors padded along ``dim`` to the longest on any rank; those without that dim unchanged."""
    for value in find_tensors(tensor):
        if value.is_nested:
            warnings.warn(
                "a nested tensor has no one length to pad to, and stays as it is; pad it before",
                CannotPadNestedTensorWarning,
                stacklevel=2,
            )
            return tensor
    if all(not -value.dim() <= dim < value.dim() for value in find_tensors(tensor)):
        return tensor
    return operations.pad_across_processes(tensor, dim, pad_index, pad_first)


def copy_tensor_to_devices(tensor: Tensor | None = None) -> Tensor:
    """Return rank 0's tensor on every rank; other ranks may pass None."""
    described = Collectives(current_comm()).gather_objects(
        None if tensor is None else [list(tensor.shape), str(tensor.dtype)]
    )
    shape, dtype = described[0]
    if tensor is None:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device="cpu")
    return operations.broadcast(tensor)


class ConvertOutputsToFp32:
    """A function that returns another one's half precision tensors in float32; it is pickled as the other."""

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        functools.update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return operations.convert_to_fp32(self.model_forward(*args, **kwargs))

    def __reduce__(self) -> Any:
        return ConvertOutputsToFp32, (self.model_forward,)

    def __deepcopy__(self, memo: dict[int, Any]) -> ConvertOutputsToFp32:
        return ConvertOutputsToFp32(copy.deepcopy(self.model_forward, memo))


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that returns another one's half precision tensors in float32."""
    converted = ConvertOutputsToFp32(model_forward)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return converted(*args, **kwargs)

    vars(forward)["__wrapped__"] = model_forward
    return forward
