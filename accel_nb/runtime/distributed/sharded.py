"""Sharded tensors: this rank's shard, its position, and collective reads of the full tensor.

A sharded tensor is a `torch.distributed.tensor.DTensor`, of which each rank holds a range of each dim, or a
tensor that was registered with `register_flat_shard`: a shard of a flattened tensor, as in ZeRO. This module imports
torch only after such a tensor exists.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from accel_nb.errors import MisuseError
from accel_nb.runtime.mesh import unravel
from accel_nb.runtime.tensors.overlap import overwrite
from accel_nb.runtime.tensors.versions import outside_inference_mode
from accel_nb.runtime.torch_private import is_checked

if TYPE_CHECKING:
    from torch import Tensor

    from accel_nb.runtime.distributed.communicator import Communicator
    from accel_nb.runtime.distributed.gathered_copies import GatheredCopies

_DONE = -1

_flat: Any = None
"""Registered flat shards by tensor; created at the first registration."""

_reader: ContextVar[Callable[[Any], Any] | None] = ContextVar("accel_nb_whole_tensors", default=None)


# Torch computes the ranks of a mesh again at each read, and takes milliseconds to create a mesh.
_ranks_of_meshes: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
_meshes_of_ranks: WeakValueDictionary[Any, Any] = WeakValueDictionary()

_copies: GatheredCopies | None = None
"""The full tensors that the code of the last cell has gathered to take views of them; None if it gathers none."""

_replaced: Any = None
"""The replacements of parameters and tensors of optimizer state, by the replaced tensor."""
_former_ids: Any = None
"""The ids of the tensors that a tensor has replaced, directly or not, by the tensor."""

_reads_together: ContextVar[bool] = ContextVar("accel_nb_reads_together", default=False)


@dataclass(frozen=True, slots=True)
class FlatShard:
    """The ranges of a flattened tensor that the ranks hold, as ``(start, length)``, and this rank's memory.

    ``held`` begins with this rank's elements and may be longer. It is None if the tensor itself is this rank's shard.
    ``number`` is different for each registration of a tensor, whose content may change without a change on this rank.
    """

    shape: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]
    rank: int
    held: Any = None
    number: int = 0


def register_flat_shard(tensor: Any, shard: FlatShard) -> Any:
    """Register a tensor that represents a full tensor of which this rank holds ``shard``; return the tensor."""
    global _flat
    if _flat is None:
        from torch.utils.weak import WeakIdKeyDictionary

        _flat = WeakIdKeyDictionary()
    _flat[tensor] = shard
    return tensor


def unregister_flat_shard(tensor: Any) -> None:
    """Undo `register_flat_shard`; do nothing for other tensors."""
    if _flat is not None:
        _flat.pop(tensor, None)


def flat_shard(tensor: Any) -> FlatShard | None:
    """Return the shard that is registered for a tensor; None for other tensors."""
    return None if _flat is None or not _is_tensor(tensor) else _flat.get(tensor)


def record_replaced(old: Any, new: Any) -> None:
    """Record that a parameter, or a tensor of an optimizer's state, was replaced by a sharded or restored one."""
    global _replaced, _former_ids
    if _replaced is None:
        from torch.utils.weak import WeakIdKeyDictionary

        _replaced, _former_ids = WeakIdKeyDictionary(), WeakIdKeyDictionary()
    _replaced.pop(new, None)
    _replaced[old] = new
    _former_ids[new] = {*former_ids(old), id(old)}


ParameterMemory = Mapping[Any, tuple[Any, Any]]
"""The storages of replaced parameters, and the replacements, by `memory_layout`."""


def memory_layout(tensor: Any) -> Any:
    """Return storage, offset, shape and strides of a plain tensor; None if it has none, or records a gradient."""
    import torch

    kinds = (torch.Tensor, torch.nn.Parameter)
    if type(tensor) not in kinds or tensor.layout is not torch.strided or tensor.is_meta or tensor.grad_fn is not None:
        return None
    storage = tensor.untyped_storage().data_ptr()
    return (storage, tensor.storage_offset(), tensor.shape, tensor.stride()) if storage and tensor.numel() else None


def record_copies(copies: GatheredCopies | None) -> None:
    """Record the copies that a cell's code gathers to read and write them; `copies` returns them."""
    global _copies
    _copies = copies


def copies() -> GatheredCopies | None:
    """Return the argument of the last `record_copies`."""
    return _copies


def current_replacement(value: Any) -> Any:
    """Return the current replacement of a parameter; any other value is returned unchanged."""
    while _replaced is not None and _is_tensor(value) and value in _replaced:
        value = _replaced[value]
    return value


def former_ids(tensor: Any) -> Collection[int]:
    """Return the ids of the tensors that a tensor has replaced."""
    return () if _former_ids is None else _former_ids.get(tensor, ())


def _is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor, without running code of its class, such as ``__getattr__``."""
    return issubclass(type(value), sys.modules["torch"].Tensor)


def is_sharded(tensor: Any) -> bool:
    """Return whether this rank holds only a shard of a tensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return (module is not None and isinstance(tensor, module.DTensor)) or flat_shard(tensor) is not None


def has_distributed_tensors() -> bool:
    """Return whether torch's module of distributed tensors is imported; importing it takes long."""
    return "torch.distributed.tensor" in sys.modules


def full_shape(tensor: Any) -> tuple[int, ...]:
    """Return the shape of the full tensor."""
    shard = flat_shard(tensor)
    return tuple(tensor.shape) if shard is None else shard.shape


def shard_number(tensor: Any) -> int:
    """Return the number of a flat shard; 0 for other tensors."""
    shard = flat_shard(tensor)
    return 0 if shard is None else shard.number


def local_shard(tensor: Any) -> Any:
    """Return this rank's shard as a view; a plain tensor is returned unchanged."""
    shard = flat_shard(tensor)
    if shard is not None:
        return tensor if shard.held is None else shard.held[: shard.ranges[shard.rank][1]]
    if not is_sharded(tensor):
        return tensor
    if is_checked("dtensor.local"):
        return tensor._local_tensor
    import torch

    with torch.no_grad():  # autograd would otherwise record the view
        return tensor.to_local()


def shard_with_gradient(parameter: Any) -> Any:
    """Return this rank's shard of a parameter, differentiable; a plain parameter is returned unchanged."""
    return parameter.to_local() if is_sharded(parameter) else parameter


def own_region(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the offsets and lengths of this rank's shard, in each dim of the full tensor; for a `DTensor`."""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return (0,) * tensor.dim(), (0,) * tensor.dim()
    return _region(tensor, tuple(coordinate))


def is_absent(tensor: Any) -> bool:
    """Return whether this rank holds no shard of a sharded tensor, such as one made by `absent_tensor`."""
    mesh = getattr(tensor, "device_mesh", None)
    return mesh is not None and mesh.get_coordinate() is None


def describe_placement(tensor: Any) -> list[Any]:
    """Describe as JSON the ranks that hold a `DTensor`, as the shape of their mesh, and its placements."""
    places = [[getattr(place, "dim", None), getattr(place, "split_factor", None)] for place in tensor.placements]
    return [_ranks_of(tensor.device_mesh), places]


def _ranks_of(mesh: Any) -> Any:
    """Return the ranks of a device mesh, as nested lists."""
    ranks = _ranks_of_meshes.get(mesh)
    if ranks is None:
        ranks = _ranks_of_meshes[mesh] = mesh.mesh.tolist()
    return ranks


def _flatten(ranks: Any) -> list[int]:
    return [ranks] if isinstance(ranks, int) else [rank for inner in ranks for rank in _flatten(inner)]


def absent_tensor(like: Tensor, placement: Sequence[Any], device: Any) -> Any:
    """Return a sharded tensor of the shape of ``like`` that only other ranks hold.

    They have described its ``placement``.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    ranks, places = placement
    key = device.type, repr(ranks)
    mesh = _meshes_of_ranks.get(key)
    if mesh is None:
        mesh = _meshes_of_ranks[key] = DeviceMesh(device.type, ranks, _init_backend=False)
    placements = [
        Replicate() if dim is None else Shard(dim) if factor is None else _StridedShard(dim, split_factor=factor)
        for dim, factor in places
    ]
    return DTensor.from_local(
        like.new_empty(0, device=device), mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def num_copies(tensor: Any, world_size: int) -> int:
    """Return how many of ``world_size`` ranks hold each shard of a `DTensor`."""
    pairs = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return world_size // math.prod(size for size, place in pairs if getattr(place, "dim", None) is not None)


def _region(tensor: Any, coordinate: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the offsets and lengths of the shard of a `DTensor` at a coordinate of its device mesh.

    The dimensions of the mesh divide a dim one after the other; a strided placement, which `fully_shard` creates for a
    tensor that was sharded before, is applied after those to its right.
    """
    offsets, lengths = [0] * tensor.dim(), list(tensor.shape)
    divided = [
        (place, size, index)
        for place, size, index in zip(tensor.placements, tensor.device_mesh.shape, coordinate, strict=True)
        if getattr(place, "dim", None) is not None
    ]
    # Not by comparison: up to torch 2.9 a strided placement equals a plain one.
    plain = [item for item in divided if not hasattr(item[0], "split_factor")]
    strided = [item for item in divided if hasattr(item[0], "split_factor")]
    for place, size, index in [*plain, *reversed(strided)]:
        length = -(-lengths[place.dim] // size)
        start = min(length * index, lengths[place.dim])
        offsets[place.dim] += start
        lengths[place.dim] = min(length, lengths[place.dim] - start)
    return tuple(offsets), tuple(lengths)


def gather_full(tensor: Any, comm: Communicator) -> Tensor:
    """Return the full tensor, on the device of its shards; every rank must call.

    It is gathered over ``comm``, the communicator of the whole world. The tensor's device mesh may belong to a process
    group that has been destroyed.
    """
    import torch

    flat = flat_shard(tensor)
    if flat is not None:
        own, longest = local_shard(tensor).detach(), max(length for _, length in flat.ranges)
        padded = torch.cat([own, own.new_zeros(longest - own.shape[0])])
        found = zip(comm.all_gather(padded), flat.ranges, strict=True)
        return torch.cat([shard[:length] for shard, (_, length) in found]).view(flat.shape)
    mesh = tensor.device_mesh
    # By region, the first rank of the mesh that holds it.
    holders: dict[Any, int] = {}
    for index, rank in enumerate(_flatten(_ranks_of(mesh))):
        holders.setdefault(_region(tensor, unravel(index, tuple(mesh.shape))), rank)
    own = local_shard(tensor).detach().reshape(-1)
    longest = max(math.prod(lengths) for _, lengths in holders)
    if own.shape[0] < longest:
        own = torch.cat([own, own.new_zeros(longest - own.shape[0])])
    gathered = comm.all_gather(own)
    whole = own.new_empty(tensor.shape)
    for region, rank in holders.items():
        narrow_to(whole, region).copy_(gathered[rank][: math.prod(region[1])].view(region[1]))
    return whole


def narrow_to(whole: Any, region: tuple[tuple[int, ...], tuple[int, ...]]) -> Any:
    """Return the view of a tensor that has these offsets and lengths."""
    for dim, (start, length) in enumerate(zip(*region, strict=True)):
        whole = whole.narrow(dim, start, length)
    return whole


def shard_like(tensor: Any, shard: Tensor) -> Any:
    """Return a tensor that is sharded like ``tensor``, with ``shard`` as this rank's shard."""
    flat = flat_shard(tensor)
    if flat is not None:
        return register_flat_shard(shard, FlatShard(flat.shape, flat.ranges, flat.rank))
    kind: Any = sys.modules["torch.distributed.tensor"]
    return kind.DTensor.from_local(
        shard, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def tensor_from_shard(shard: Tensor, device_mesh: Any, dim: int, like: Tensor) -> Any:
    """Return a tensor of the shape of ``like`` that is sharded along ``dim``, with ``shard`` as this rank's shard."""
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(shard, device_mesh, [Shard(dim)], run_check=False, shape=like.shape, stride=like.stride())


def own_shard(tensor: Any, whole: Tensor) -> Tensor:
    """Return this rank's shard of the full tensor ``whole``, sharded like ``tensor``; a view if possible."""
    flat = flat_shard(tensor)
    if flat is not None:
        return whole.reshape(-1).narrow(0, *flat.ranges[flat.rank])
    return narrow_to(whole, own_region(tensor))


def copy_into(tensor: Any, whole: Any) -> None:
    """Copy a full tensor, or this rank's shard of it, into a tensor in place, without communication."""
    if is_sharded(tensor) and not is_sharded(whole):
        whole = own_shard(tensor, whole)
    overwrite(local_shard(tensor).detach(), local_shard(whole))  # one of inference mode can be written as a view only


def shard_state(values: Any, parameter: Any) -> Any:
    """Return a parameter's optimizer state, with tensors of the parameter's shape sharded like the parameter."""
    if not is_sharded(parameter):
        return values
    return {
        name: shard_like(parameter, own_shard(parameter, value).clone())
        if hasattr(value, "dim") and value.dim() and value.shape == full_shape(parameter) and not is_sharded(value)
        else value
        for name, value in values.items()
    }


def full_tensor(tensor: Any) -> Any:
    """Return the full tensor; a plain tensor is returned unchanged.

    Raises `MisuseError` outside of `collective_reads` and `lead_reads`, in which all ranks take part in the gather.
    """
    if not is_sharded(tensor):
        return tensor
    with outside_inference_mode():
        return require_reader()(tensor)


def whole_number_methods(problem: str | None = None) -> Iterator[tuple[type, str, Callable[[Any], Any]]]:
    """Yield the methods of sharded tensors that read values as numbers: their class, their name and a wrapper.

    Torch's methods return this rank's number, such as the norm of its shard. The wrapped ones return the number for all
    shards, and every rank must call them. With ``problem``, for ranks that hold different tensors, they raise
    `MisuseError`.
    """

    def of_all_shards(plain: Any) -> Any:
        @functools.wraps(plain)
        def read(self: Any, *args: Any) -> Any:
            if problem is not None:
                raise MisuseError(problem)
            return plain(add_up_shards(self.detach()), *args)

        return read

    module = sys.modules.get("torch.distributed.tensor")
    if module is not None:
        for name in ("item", "tolist", "__float__", "__int__", "__bool__", "__format__"):
            yield module.DTensor, name, of_all_shards


def add_up_shards(tensor: Any) -> Any:
    """Return the full tensor of a `DTensor`, also with partial placements, which are summed; every rank must call."""
    kind: Any = sys.modules["torch.distributed.tensor"]
    places = list(tensor.placements)
    for dim in reversed(range(len(places))):  # torch warns of sums over several dimensions at once
        if places[dim].is_partial():
            places[dim] = kind.Replicate()
            tensor = tensor.redistribute(placements=places)
    return tensor.full_tensor()


def can_read_full() -> bool:
    """Return whether `full_tensor` can gather in this context."""
    return _reader.get() is not None


def reads_together() -> bool:
    """Return whether all ranks run the same code, in `collective_reads`."""
    return _reads_together.get()


def require_reader() -> Callable[[Any], Any]:
    """Return the function that gathers full tensors in this context; raise `MisuseError` as `full_tensor` does."""
    read = _reader.get()
    if read is None:
        raise MisuseError(
            "each rank holds shards of the model, which cannot be copied here: accelerator.get_state_dict(model), "
            "called by every rank, returns whole tensors; or copy the model before it is prepared"
        )
    return read


@contextmanager
def collective_reads(comm: Communicator) -> Iterator[None]:
    """Enable `full_tensor` in the block; every rank must make the same calls in it."""
    token, together = _reader.set(lambda tensor: gather_full(tensor, comm)), _reads_together.set(True)
    try:
        yield
    finally:
        _reads_together.reset(together)
        _reader.reset(token)


@contextmanager
def no_collective_reads() -> Iterator[None]:
    """Disable `full_tensor` in the block: tensors stay sharded."""
    token = _reader.set(None)
    try:
        yield
    finally:
        _reader.reset(token)


@contextmanager
def lead_reads(comm: Communicator, tensors: Sequence[Any]) -> Iterator[None]:
    """Enable `full_tensor` for ``tensors`` in the block, on rank 0, while the other ranks run `serve_reads`.

    All ranks must pass the same tensors in the same order.
    """
    numbers = {id(tensor): number for number, tensor in enumerate(tensors)}

    def read(tensor: Any) -> Any:
        number = numbers.get(id(tensor))
        if number is None:
            raise MisuseError("this rank holds only a shard of the tensor, and the other ranks cannot identify it")
        comm.broadcast_json(number)
        return gather_full(tensor, comm)

    token = _reader.set(read)
    try:
        yield
    finally:
        _reader.reset(token)
        comm.broadcast_json(_DONE)


def serve_reads(comm: Communicator, tensors: Sequence[Any]) -> None:
    """Join the gathers of rank 0 until its `lead_reads` block ends."""
    while (number := comm.broadcast_json(None)) != _DONE:
        gather_full(tensors[number], comm)
