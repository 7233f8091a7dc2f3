"""Collectives among ranks: tensors through torch, other values as JSON.

Every rank must make the same calls in the same order; each call waits for all ranks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from accel_nb.errors import MisuseError
from accel_nb.runtime.devices.registry import device_type
from accel_nb.runtime.distributed.memory_exchange import MemoryExchange
from accel_nb.runtime.distributed.process_group import DefaultGroup
from accel_nb.runtime.tensors.overlap import overwrite
from accel_nb.runtime.world import World

Operation = Literal["sum", "mean", "max", "min"]

_OPERATIONS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


_IN_PLACE: dict[str, Callable[[Tensor, Tensor], object]] = {
    "max": lambda total, part: torch.maximum(total, part, out=total),
    "min": lambda total, part: torch.minimum(total, part, out=total),
}
_MAX_GATHERED_BYTES = 1 << 16
"""The largest tensor that each rank gathers from all ranks and adds; the backend sends less of larger ones."""


class Communicator(Protocol):
    """The interface of collectives that the rest of the package uses."""

    world: World

    def all_reduce(self, tensor: Tensor, op: Operation = "sum") -> Tensor:
        """Replace ``tensor`` by the sum, mean, maximum or minimum over all ranks, and return it."""
        ...

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's tensor, in rank order; shapes and dtypes must be equal on all ranks."""
        ...

    def reduce_scatter(self, tensor: Tensor, op: Operation = "sum") -> Tensor:
        """Reduce over ranks and return this rank's share of the first dim, which the world size must divide."""
        ...

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Replace the content of ``tensor`` by that of rank ``source``'s tensor, and return it."""
        ...

    def scatter(self, tensor: Tensor, parts: Sequence[Tensor] | None, source: int = 0) -> Tensor:
        """Replace ``tensor`` by this rank's item of the ``parts`` of rank ``source``, and return it.

        All parts have the shape and dtype of ``tensor``; on other ranks ``parts`` is None.
        """
        ...

    def sums_at_once(self, tensor: Tensor) -> bool:
        """Return whether `all_reduce` sends a tensor in one message; running it asynchronously then gains nothing."""
        ...

    def start_any(self, flag: bool) -> Callable[[], bool]:
        """Start a reduction on the host; return a function that waits and returns whether any rank's flag is set.

        Every rank must call at the same position among its collectives. No work is queued on the device.
        """
        ...

    def all_gather_json(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order; raise `MisuseError` for a value that JSON cannot represent."""
        ...

    def broadcast_json(self, value: Any, source: int = 0) -> Any:
        """Return rank ``source``'s value; raise `MisuseError` if JSON cannot represent it."""
        ...

    def barrier(self, timeout_s: float | None = None) -> None:
        """Wait until every rank has called; with ``timeout_s`` it may raise `RuntimeError` after that time."""
        ...


class LocalComm:
    """The communicator of a world of one rank."""

    def __init__(self, world: World | None = None) -> None:
        self.world = world or World()
        if self.world.size != 1:
            raise ValueError(f"a local communicator is for a world of 1, not of {self.world.size}")

    def all_reduce(self, tensor: Tensor, op: Operation = "sum") -> Tensor:
        """Return the tensor unchanged."""
        _operation(op)
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return a list with a copy of the tensor."""
        return [tensor.detach().clone()]

    def reduce_scatter(self, tensor: Tensor, op: Operation = "sum") -> Tensor:
        """Return a copy of the tensor."""
        _operation(op)
        return tensor.detach().clone()

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Return the tensor unchanged."""
        return tensor

    def scatter(self, tensor: Tensor, parts: Sequence[Tensor] | None, source: int = 0) -> Tensor:
        """Replace the tensor by the only part."""
        return overwrite(tensor, _parts_of(parts, 1)[0])

    def sums_at_once(self, tensor: Tensor) -> bool:
        """Return True: nothing is sent."""
        return True

    def start_any(self, flag: bool) -> Callable[[], bool]:
        """Return a function that returns the flag."""
        return lambda: flag

    def all_gather_json(self, value: Any) -> list[Any]:
        """Return a list with the value, encoded and decoded as JSON as other communicators do."""
        return [_decode(_encode(value))]

    def broadcast_json(self, value: Any, source: int = 0) -> Any:
        """Return the value, encoded and decoded as JSON as other communicators do."""
        return _decode(_encode(value))

    def barrier(self, timeout_s: float | None = None) -> None:
        """Return at once."""


class TorchComm:
    """The communicator over torch's default process group, or over a subgroup of it.

    Tensors may be on the CPU or on this rank's device. If the backend cannot send from a tensor's device, the tensor is
    copied to a device from which it can, and the result is copied back.

    With a ``subgroup``, ``world`` numbers its ranks from 0, and ``ranks`` are their numbers in the default group.
    """

    def __init__(
        self, world: World, group: DefaultGroup, subgroup: dist.ProcessGroup | None = None, ranks: Sequence[int] = ()
    ) -> None:
        self.world = world
        self.group = group
        self._subgroup = subgroup
        self._ranks = tuple(ranks)
        kind = device_type(world.device)
        self._device = kind.make_current(torch.device(world.device))
        self._sends_device_only = not kind.backend_sends_host_tensors and dist.get_backend() == kind.backend
        self._host_groups: tuple[Any, Any] | None = None

    def all_reduce(self, tensor: Tensor, op: Operation = "sum") -> Tensor:
        """Replace ``tensor`` by its reduction over all ranks, and return it."""
        operation = _operation(op)
        work = self._to_sendable(tensor)
        if self.sums_at_once(work):
            self._reduce_in_order(work.detach(), op)
        else:
            dist.all_reduce(work, operation, group=self._subgroup)
        if op == "mean":
            work.div_(self.world.size)
        return _overwrite(tensor, work)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's tensor, on the device of ``tensor``."""
        if tensor.is_complex():
            return [torch.view_as_complex(part) for part in self.all_gather(torch.view_as_real(tensor))]
        work = self._to_sendable(tensor.detach())
        if (exchange := self._exchange_for(work)) is not None:
            gathered = exchange.all_gather(work)
        else:
            gathered = [torch.empty_like(work) for _ in range(self.world.size)]
            # Call the group directly: the wrapper in torch.distributed needs as much CPU time as the collective.
            self.process_group.allgather([gathered], [work]).wait()
        return gathered if work.device == tensor.device else [part.to(tensor.device) for part in gathered]

    def reduce_scatter(self, tensor: Tensor, op: Operation = "sum") -> Tensor:
        """Return this rank's share of the reduced first dim."""
        operation = _operation(op)
        work = self._to_sendable(tensor.detach())
        if work.dim() == 0 or work.shape[0] % self.world.size:
            raise MisuseError(
                f"reduce_scatter of shape {tuple(tensor.shape)}: the first dim must be a multiple of {self.world.size}"
            )
        share = work.shape[0] // self.world.size
        if self._sends_device_only:
            result = work.new_empty(share, *work.shape[1:])
            dist.reduce_scatter_tensor(result, work, operation, group=self._subgroup)
        else:  # gloo has no reduce_scatter before torch 2.7
            work = work.clone()
            dist.all_reduce(work, operation, group=self._subgroup)
            result = work.narrow(0, self.world.rank * share, share).clone()
        if op == "mean":
            result.div_(self.world.size)
        return result.to(tensor.device)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Replace the content of ``tensor`` by that of rank ``source``'s tensor, and return it."""
        work = self._to_sendable(tensor)
        if (exchange := self._exchange_for(work)) is not None:
            work = exchange.broadcast(work.detach(), source)
            return tensor if self.world.rank == source else _overwrite(tensor, work)
        dist.broadcast(work, self._global_rank(source), group=self._subgroup)
        return _overwrite(tensor, work)

    def scatter(self, tensor: Tensor, parts: Sequence[Tensor] | None, source: int = 0) -> Tensor:
        """Replace ``tensor`` by this rank's item of ``parts``, and return it."""
        work = self._to_sendable(tensor)
        if self.world.rank == source:
            sent = [self._to_sendable(part) for part in _parts_of(parts, self.world.size)]
            dist.scatter(work, sent, self._global_rank(source), group=self._subgroup)
        else:
            dist.scatter(work, None, self._global_rank(source), group=self._subgroup)
        return tensor if work is tensor else overwrite(tensor, work)

    def sums_at_once(self, tensor: Tensor) -> bool:
        """Return whether `all_reduce` gathers a tensor and adds in the order of ranks, where this is not slower.

        The result is then the same to the bit on one machine, through memory, and on several. Every rank must call.
        """
        if self._subgroup is not None or self._sends_device_only or not (tensor.is_cpu and _is_plain(tensor)):
            return False
        if tensor.numel() * tensor.element_size() <= _MAX_GATHERED_BYTES:
            return True
        return self.world.size == 2 and self._exchange_for(tensor) is not None  # any order of two has the same sum

    def start_send(self, tensor: Tensor, target: int) -> Callable[[], object]:
        """Start to send a tensor to one rank; return a function that waits, until which it must not be changed."""
        work: Any = dist.isend(self._to_sendable(tensor.detach()), self._global_rank(target), self._subgroup)
        return work.wait

    def receive(self, tensor: Tensor, source: int) -> Tensor:
        """Replace the content of ``tensor`` by the tensor that rank ``source`` sends, and return it."""
        work = self._to_sendable(tensor)
        dist.recv(work, self._global_rank(source), self._subgroup)
        return tensor if work is tensor else overwrite(tensor, work)

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Send one part to each rank, and return the received parts, in rank order and of these shapes."""
        work = self._to_sendable(torch.cat([part.detach().reshape(-1) for part in parts]))
        lengths = [math.prod(shape) for shape in shapes]
        received = work.new_empty(sum(lengths))
        sent = [part.numel() for part in parts]
        dist.all_to_all_single(received, work, lengths, sent, group=self._subgroup)
        found = received.to(parts[0].device).split(lengths)
        return [part.view(list(shape)) for part, shape in zip(found, shapes, strict=True)]

    def start_any(self, flag: bool) -> Callable[[], bool]:
        """Start an all-reduce of the flags by maximum in the background, between the hosts' CPUs."""
        raised = torch.tensor([int(flag)], dtype=torch.int32, device="cpu")
        work: Any = dist.all_reduce(raised, dist.ReduceOp.MAX, group=self._host_group(), async_op=True)

        def wait() -> bool:
            work.wait()
            return bool(raised.item())

        return wait

    def all_gather_json(self, value: Any) -> list[Any]:
        """Return every rank's value; every rank raises if JSON cannot represent the value of any rank."""
        message, problem = self._message(value)
        lengths = [
            int(n) for n in self.all_gather(torch.tensor([len(message) if problem is None else -1], device="cpu"))
        ]
        self._raise_for_ranks(problem, [rank for rank, length in enumerate(lengths) if length < 0])
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
        padded[: len(message)] = _as_bytes(message)
        parts = self.all_gather(padded)
        return [_decode(part[:length].numpy().tobytes()) for part, length in zip(parts, lengths, strict=True)]

    def broadcast_json(self, value: Any, source: int = 0) -> Any:
        """Return rank ``source``'s value; every rank raises if JSON cannot represent it."""
        message, problem = self._message(value) if self.world.rank == source else (b"", None)
        length = int(self.broadcast(torch.tensor([len(message) if problem is None else -1], device="cpu"), source))
        self._raise_for_ranks(problem, [source] if length < 0 else [])
        content = (
            _as_bytes(message) if self.world.rank == source else torch.zeros(length, dtype=torch.uint8, device="cpu")
        )
        return _decode(self.broadcast(content, source).numpy().tobytes())

    def barrier(self, timeout_s: float | None = None) -> None:
        """Wait until every rank has called and earlier messages have arrived.

        With ``timeout_s`` it raises `RuntimeError` after that time, if the backend is gloo; others ignore it.
        """
        if timeout_s is not None and dist.get_backend() == "gloo":
            dist.monitored_barrier(self._subgroup, timeout=timedelta(seconds=timeout_s))
        if self._sends_device_only:
            dist.barrier(self._subgroup, device_ids=[self._device.index])
        else:
            dist.barrier(self._subgroup)

    def _host_group(self) -> Any:
        """Return a group that can send host tensors: this communicator's, else one that is opened on first use.

        Ranks outside of a subgroup take no part, and opening a group needs all ranks: raises `MisuseError`.
        """
        if not self._sends_device_only:
            return self._subgroup
        if self._subgroup is not None:
            raise MisuseError("flags are exchanged by all ranks, and not by those of a subgroup")
        default: Any = dist.group.WORLD
        if self._host_groups is None or self._host_groups[0] is not default:  # the default group was reopened since
            self._host_groups = (default, dist.new_group(backend="gloo"))
        return self._host_groups[1]

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group of torch.distributed that sends the messages."""
        group = self._subgroup or dist.group.WORLD
        assert group is not None
        return group

    def _exchange_for(self, tensor: Tensor) -> MemoryExchange | None:
        """Return the memory through which all ranks exchange a tensor; None if it is sent by torch."""
        exchange = self.group.exchange() if self._subgroup is None else None
        return exchange if exchange is not None and exchange.accepts(tensor) else None

    def _reduce_in_order(self, tensor: Tensor, op: Operation) -> None:
        """Replace a tensor by the ranks' sum, maximum or minimum, computed in rank order."""
        combine = _IN_PLACE.get(op, Tensor.add_)
        if (exchange := self._exchange_for(tensor)) is not None:
            exchange.all_reduce(tensor, combine)
            return
        for rank, part in enumerate(self.all_gather(tensor)):
            (combine if rank else Tensor.copy_)(tensor, part)

    def _global_rank(self, rank: int) -> int:
        return self._ranks[rank] if self._ranks else rank

    def _to_sendable(self, tensor: Tensor) -> Tensor:
        if self._sends_device_only and tensor.is_cpu:
            tensor = tensor.to(self._device)
        elif not device_type(tensor.device).in_collectives:
            tensor = tensor.cpu()
        # A sparse tensor, such as the gradient of an embedding, has no such order; gloo sums it as it is.
        return tensor if tensor.layout is not torch.strided or tensor.is_contiguous() else tensor.contiguous()

    def _message(self, value: Any) -> tuple[bytes, MisuseError | None]:
        try:
            return _encode(value), None
        except MisuseError as error:
            return b"", error

    def _raise_for_ranks(self, problem: MisuseError | None, ranks: list[int]) -> None:
        # Raise on every rank: otherwise ranks with a valid value would wait forever.
        if problem is not None:
            raise problem
        if ranks:
            raise MisuseError(f"rank {ranks[0]} tried to send a value that is not JSON; its error has details")


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_complex()


def _overwrite(tensor: Tensor, result: Tensor) -> Tensor:
    """Copy a result into ``tensor``, which may be a parameter, unless it is the same; return ``tensor``."""
    if result is not tensor:
        overwrite(tensor.detach(), result)
    return tensor


def _operation(op: str) -> Any:
    try:
        return _OPERATIONS[op]
    except KeyError:
        raise MisuseError(f"reduction {op!r} is unknown; there are {', '.join(_OPERATIONS)}") from None


def _parts_of(parts: Sequence[Tensor] | None, size: int) -> Sequence[Tensor]:
    if parts is None or len(parts) != size:
        given = "none" if parts is None else str(len(parts))
        raise MisuseError(f"scatter takes one part for each of the {size} ranks, and its source passed {given}")
    return parts


def _encode(value: Any) -> bytes:
    try:
        return json.dumps(value).encode()
    except (TypeError, ValueError) as error:
        raise MisuseError(
            f"cannot send {type(value).__name__} between ranks: {error}. Send numbers, text, lists and dicts with "
            "text keys; tensors go through gather, reduce and broadcast"
        ) from error


def _decode(message: bytes) -> Any:
    return json.loads(message)


def _as_bytes(message: bytes) -> Tensor:
    return (
        torch.frombuffer(bytearray(message), dtype=torch.uint8)
        if message
        else torch.zeros(0, dtype=torch.uint8, device="cpu")
    )
