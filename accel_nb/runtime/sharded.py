"""Tensors of which each rank holds a part: their own part, where it lies, and ways to the whole.

They are PyTorch's distributed tensors, divided along their first dim as `fully_shard` divides parameters. Nothing here
imports them: where they were never imported there are none.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from accel_nb.errors import MisuseError

if TYPE_CHECKING:
    from torch import Tensor

    from accel_nb.runtime.comm import Communicator

_DONE = -1

_reader: ContextVar[Callable[[Any], Any] | None] = ContextVar("accel_nb_whole_tensors", default=None)


def is_sharded(tensor: Any) -> bool:
    """Whether this rank holds only a part of a tensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Any) -> Any:
    """Return this rank's part, which shares its memory; a plain tensor as it is."""
    return tensor._local_tensor if is_sharded(tensor) else tensor


def num_parts(tensor: Any) -> int:
    """Return into how many parts a sharded tensor is divided; with replicas there are fewer than ranks."""
    return math.prod(
        size for size, place in zip(tensor.device_mesh.shape, tensor.placements, strict=True) if place.is_shard()
    )


def start_of(tensor: Any) -> int:
    """Return the first row of this rank's part."""
    rows = -(-tensor.shape[0] // num_parts(tensor))
    coordinate = next(
        index
        for index, place in zip(tensor.device_mesh.get_coordinate(), tensor.placements, strict=True)
        if place.is_shard()
    )
    return min(rows * coordinate, tensor.shape[0])


def gather(tensor: Any, comm: Communicator) -> Tensor:
    """Return the whole of a sharded tensor, on the device of its parts; every rank must call.

    Over ``comm``, not the tensor's own mesh: that may belong to a process group that is gone.
    """
    import torch

    part, parts = local(tensor).detach(), num_parts(tensor)
    rows = -(-tensor.shape[0] // parts)
    if part.shape[0] < rows:
        part = torch.cat([part, part.new_zeros(rows - part.shape[0], *tensor.shape[1:])])
    return torch.cat(comm.all_gather(part)[:parts])[: tensor.shape[0]]  # only the last parts are padded


def like(tensor: Any, part: Tensor) -> Any:
    """Return a tensor that is sharded as another one, of which ``part`` is this rank's part."""
    kind: Any = sys.modules["torch.distributed.tensor"]
    return kind.DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def own_part(tensor: Any, whole: Tensor) -> Tensor:
    """Return the rows of ``whole`` that this rank holds of a sharded tensor; a view."""
    return whole.narrow(0, start_of(tensor), local(tensor).shape[0])


def fill(tensor: Any, whole: Any) -> None:
    """Copy a whole tensor, or this rank's part of it, into a tensor in place; no other rank is involved."""
    if is_sharded(tensor) and not is_sharded(whole):
        whole = own_part(tensor, whole)
    local(tensor).copy_(local(whole))


def divided(values: Any, parameter: Any) -> Any:
    """Return what an optimizer keeps of a parameter, its tensors of the parameter's shape sharded as that is."""
    if not is_sharded(parameter):
        return values
    return {
        name: like(parameter, own_part(parameter, value).clone())
        if hasattr(value, "dim") and value.dim() and value.shape == parameter.shape and not is_sharded(value)
        else value
        for name, value in values.items()
    }


def whole(tensor: Any) -> Any:
    """Return all of a tensor; a plain one as it is.

    Raises `MisuseError` where ranks do not read together, as inside of `together` and `leading` they do.
    """
    if not is_sharded(tensor):
        return tensor
    return require_reading()(tensor)


def is_reading() -> bool:
    """Whether `whole` can read here."""
    return _reader.get() is not None


def require_reading() -> Callable[[Any], Any]:
    """Return what reads whole tensors here; raises `MisuseError` as `whole` does."""
    read = _reader.get()
    if read is None:
        raise MisuseError(
            "each rank holds only a part of the model, which cannot be copied here: accelerator.get_state_dict(model), "
            "called by every rank, returns whole tensors; or copy the model before it is prepared"
        )
    return read


@contextmanager
def together(comm: Communicator) -> Iterator[None]:
    """Let `whole` gather in the block; every rank makes the same calls."""
    token = _reader.set(lambda tensor: gather(tensor, comm))
    try:
        yield
    finally:
        _reader.reset(token)


@contextmanager
def apart() -> Iterator[None]:
    """Leave tensors in parts in the block."""
    token = _reader.set(None)
    try:
        yield
    finally:
        _reader.reset(token)


@contextmanager
def leading(comm: Communicator, tensors: Sequence[Any]) -> Iterator[None]:
    """Let this rank, the first, ask for ``tensors`` by `whole` in the block, while the others `follow`.

    All ranks give the same tensors in the same order.
    """
    numbers = {id(tensor): number for number, tensor in enumerate(tensors)}

    def read(tensor: Any) -> Any:
        number = numbers.get(id(tensor))
        if number is None:
            raise MisuseError("this rank holds only a part of the tensor, and the others do not know which it is")
        comm.broadcast_json(number)
        return gather(tensor, comm)

    token = _reader.set(read)
    try:
        yield
    finally:
        _reader.reset(token)
        comm.broadcast_json(_DONE)


def follow(comm: Communicator, tensors: Sequence[Any]) -> None:
    """Help the first rank to read whole tensors, until its block of `leading` ends."""
    while (number := comm.broadcast_json(None)) != _DONE:
        gather(tensors[number], comm)
