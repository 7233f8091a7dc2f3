"""Tensors of which each rank holds a part: their own part, where it lies, and ways to the whole.

They are PyTorch's distributed tensors, divided along their first dim as `fully_shard` divides parameters, or tensors
that stand for a part of a flattened one, as ZeRO divides, of which `note_flat` was told. Nothing here imports torch
before there are such tensors.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accel_nb.errors import MisuseError
from accel_nb.runtime.tensors.overlap import overwrite
from accel_nb.runtime.torch_private import is_checked

if TYPE_CHECKING:
    from torch import Tensor

    from accel_nb.runtime.distributed.communicator import Communicator

_DONE = -1

_flat: Any = None
"""What is known of flat parts, by tensor; made when there is the first."""

_reader: ContextVar[Callable[[Any], Any] | None] = ContextVar("accel_nb_whole_tensors", default=None)


@dataclass(frozen=True, slots=True)
class FlatPart:
    """Which elements of a flattened tensor each rank holds, as ``(start, length)``, and where this rank's lie.

    ``held`` begins with this rank's elements and may be longer; None: the tensor itself is this rank's part.
    """

    shape: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]
    rank: int
    held: Any = None


def note_flat(tensor: Any, part: FlatPart) -> Any:
    """Let a tensor stand for a tensor of which this rank has a part; returns it."""
    global _flat
    if _flat is None:
        from torch.utils.weak import WeakIdKeyDictionary

        _flat = WeakIdKeyDictionary()
    _flat[tensor] = part
    return tensor


def forget_flat(tensor: Any) -> None:
    """Undo `note_flat`; does nothing to another tensor."""
    if _flat is not None:
        _flat.pop(tensor, None)


def flat_part(tensor: Any) -> FlatPart | None:
    """Return what `note_flat` was told of a tensor."""
    return None if _flat is None or not hasattr(tensor, "untyped_storage") else _flat.get(tensor)


def is_sharded(tensor: Any) -> bool:
    """Whether this rank holds only a part of a tensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return (module is not None and isinstance(tensor, module.DTensor)) or flat_part(tensor) is not None


def shape_of(tensor: Any) -> tuple[int, ...]:
    """Return the shape of the whole of a tensor."""
    part = flat_part(tensor)
    return tuple(tensor.shape) if part is None else part.shape


def local(tensor: Any) -> Any:
    """Return this rank's part, which shares its memory; a plain tensor as it is."""
    part = flat_part(tensor)
    if part is not None:
        return tensor if part.held is None else part.held[: part.ranges[part.rank][1]]
    if not is_sharded(tensor):
        return tensor
    if is_checked("dtensor.local"):
        return tensor._local_tensor
    import torch

    with torch.no_grad():  # with gradients it would be a view that autograd records
        return tensor.to_local()


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

    flat = flat_part(tensor)
    if flat is not None:
        own, longest = local(tensor).detach(), max(length for _, length in flat.ranges)
        padded = torch.cat([own, own.new_zeros(longest - own.shape[0])])
        found = zip(comm.all_gather(padded), flat.ranges, strict=True)
        return torch.cat([part[:length] for part, (_, length) in found]).view(flat.shape)
    part, parts = local(tensor).detach(), num_parts(tensor)
    rows = -(-tensor.shape[0] // parts)
    if part.shape[0] < rows:
        part = torch.cat([part, part.new_zeros(rows - part.shape[0], *tensor.shape[1:])])
    return torch.cat(comm.all_gather(part)[:parts])[: tensor.shape[0]]  # only the last parts are padded


def like(tensor: Any, part: Tensor) -> Any:
    """Return a tensor that is sharded as another one, of which ``part`` is this rank's part."""
    flat = flat_part(tensor)
    if flat is not None:
        return note_flat(part, FlatPart(flat.shape, flat.ranges, flat.rank))
    kind: Any = sys.modules["torch.distributed.tensor"]
    return kind.DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def own_part(tensor: Any, whole: Tensor) -> Tensor:
    """Return what this rank holds of a sharded tensor out of ``whole``; a view where that is contiguous."""
    flat = flat_part(tensor)
    if flat is not None:
        return whole.reshape(-1).narrow(0, *flat.ranges[flat.rank])
    return whole.narrow(0, start_of(tensor), local(tensor).shape[0])


def fill(tensor: Any, whole: Any) -> None:
    """Copy a whole tensor, or this rank's part of it, into a tensor in place; no other rank is involved."""
    if is_sharded(tensor) and not is_sharded(whole):
        whole = own_part(tensor, whole)
    overwrite(local(tensor), local(whole))


def divided(values: Any, parameter: Any) -> Any:
    """Return what an optimizer keeps of a parameter, its tensors of the parameter's shape sharded as that is."""
    if not is_sharded(parameter):
        return values
    return {
        name: like(parameter, own_part(parameter, value).clone())
        if hasattr(value, "dim") and value.dim() and value.shape == shape_of(parameter) and not is_sharded(value)
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
