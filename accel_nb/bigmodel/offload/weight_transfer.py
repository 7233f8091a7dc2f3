"""Ways for weights to reach the memory that a device computes from.

A lane fills buffers in a reader's thread and tells the computing thread when it may use them. `HostLane` lends pages of
files, or reads them into memory. `SideLane` goes through page-locked memory and a queue of its own; what it asks of the
device is a `Queue`, so that what it does is the same whatever the device.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from accel_nb.bigmodel.host_memory import empty_tensors
from accel_nb.bigmodel.offload import mmap_weights, openmp
from accel_nb.bigmodel.offload.mmap_weights import Loan
from accel_nb.bigmodel.safetensors_reader import CHUNK_BYTES, FileTensor
from accel_nb.runtime.devices.registry import device_type
from accel_nb.runtime.process.hardware import num_usable_cores

_MOST_THREADS = 8
_DISK_THREADS = 4
"""Enough reads at once for a disk; those who wait for it need no core each."""


class HostTensor:
    """A weight that lies in memory."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()

    @property
    def dtype(self) -> torch.dtype:
        """The one that it is stored in."""
        return self.tensor.dtype

    def is_at_hand(self) -> bool:
        """Return True."""
        return True

    def will_read(self) -> None:
        """Do nothing: it is there."""

    def read_into(self, out: Tensor) -> None:
        """Copy, converting if need be."""
        out.copy_(self.tensor)


Source = FileTensor | HostTensor


class Lane(Protocol):
    """How weights get into buffers; the calls are in the order of a buffer's life."""

    @property
    def device(self) -> torch.device:
        """Where the buffers are."""
        ...

    def allocate(self, nbytes: int) -> Tensor:
        """Return a new buffer of bytes."""
        ...

    def can_lend(self, sources: Sequence[Source], *, rows_only: bool = False) -> bool:
        """Whether tensors can be computed with where they lie: ask `lend` for them then, in place of a buffer.

        ``rows_only``: few rows of each are looked up.
        """
        ...

    def gains_by_reading_ahead(self, sources: Sequence[Source]) -> bool:
        """Whether a buffer is better filled beside the computation than right before it."""
        ...

    def fill(self, jobs: Sequence[tuple[Source, Tensor]], marks: Sequence[Any]) -> Any:
        """Fill parts of a buffer once what ``marks`` stand for is over; return a ticket for `ready`. Any thread."""
        ...

    def ready(self, ticket: Any) -> None:
        """Let the calling thread's computation come after the filling."""
        ...

    def mark(self, buffer: Tensor) -> Any:
        """Return a mark for the computation that the calling thread has started on a buffer, or None."""
        ...


def lend(sources: Sequence[Source], *, rows_only: bool = False) -> Loan:
    """Return the files' own pages, and weights that lie in memory, where a lane said that it `can_lend`. Any thread."""
    loan = mmap_weights.lend([source for source in sources if isinstance(source, FileTensor)], rows_only=rows_only)
    pages = iter(loan.tensors)
    loan.tensors = [next(pages) if isinstance(source, FileTensor) else source.tensor for source in sources]
    return loan


class HostLane:
    """Lends pages of files to the CPU, or reads into memory; when a buffer is filled, it is ready.

    To read into memory what the system has in its cache is to copy it, which takes the cores that compute: beside a
    computation both would be late. It is done right before, by as many threads as torch computes with.
    """

    device = torch.device("cpu")

    def __init__(self, num_threads: int | None = None) -> None:
        self._num_threads = num_threads or min(_MOST_THREADS, torch.get_num_threads())

    def allocate(self, nbytes: int) -> Tensor:
        """Return memory in large pages where the system has them."""
        return empty_tensors([((nbytes,), torch.uint8)])[0]

    def can_lend(self, sources: Sequence[Source], *, rows_only: bool = False) -> bool:
        """Whether pages of files, if any, do as well as memory."""
        return mmap_weights.can_lend(
            [source for source in sources if isinstance(source, FileTensor)], rows_only=rows_only
        )

    def gains_by_reading_ahead(self, sources: Sequence[Source]) -> bool:
        """Whether a disk has to deliver something, for which no core waits."""
        return not mmap_weights.are_at_hand([source for source in sources if isinstance(source, FileTensor)])

    def fill(self, jobs: Sequence[tuple[Source, Tensor]], marks: Sequence[Any]) -> None:
        """Read now; this thread takes part."""
        away = [source for source, _ in jobs if not source.is_at_hand()]
        for source in away:
            source.will_read()
        num_threads = max(self._num_threads, _DISK_THREADS) if away else self._num_threads
        parts = deque(_parts(jobs))
        num_helpers = min(num_threads - 1, sum(out.nbytes for _, out in jobs) // CHUNK_BYTES)
        if num_helpers and 2 * (num_helpers + 1) >= num_usable_cores():
            openmp.rest()  # on more cores, few threads that copy find room; to start all others takes longer
        _read_with(num_helpers, parts)

    def ready(self, ticket: None) -> None:
        """Do nothing."""

    def mark(self, buffer: Tensor) -> None:
        """Do nothing: the CPU has ended what it did."""


def _parts(jobs: Sequence[tuple[Source, Tensor]]) -> Iterator[tuple[Source, Tensor]]:
    """Divide tensors that are read as they are."""
    for source, out in jobs:
        if isinstance(source, HostTensor) or source.dtype != out.dtype:
            yield source, out
            continue
        flat = out.view(-1)
        per_part = CHUNK_BYTES // out.dtype.itemsize
        for begin in range(0, flat.numel(), per_part):
            count = min(per_part, flat.numel() - begin)
            yield source.part(begin, count), flat[begin : begin + count]


def _read_with(num_helpers: int, parts: deque[tuple[Source, Tensor]]) -> None:
    """Read parts in this thread and others, of which none writes to memory any more when this ends."""
    failures: list[Exception] = []

    def help_reading() -> None:
        try:
            _read(parts)
        except Exception as error:
            failures.append(error)
            parts.clear()

    helpers: list[threading.Thread] = []
    try:
        with suppress(RuntimeError):  # a limit of memory may leave no room for a thread
            for _ in range(num_helpers):
                helper = threading.Thread(target=help_reading, name="accel_nb-fill")
                helper.start()
                helpers.append(helper)
        _read(parts)
    finally:
        parts.clear()
        for helper in helpers:
            helper.join()
    if failures:
        raise failures[0]


def _read(parts: deque[tuple[Source, Tensor]]) -> None:
    """Read parts until others have taken the last."""
    while True:
        try:
            source, out = parts.popleft()
        except IndexError:
            return
        source.read_into(out)


class Queue(Protocol):
    """What a device does beside its computing: copies in the order of the calls."""

    def pinned(self, nbytes: int) -> Tensor:
        """Return memory of the host from which copies run by themselves."""
        ...

    def copy(self, source: Tensor, out: Tensor) -> None:
        """Queue a copy to the device."""
        ...

    def note(self) -> Any:
        """Return a mark for the end of all that has been queued."""
        ...

    def wait_for(self, mark: Any) -> None:
        """Queue nothing more before a mark of the computation."""
        ...

    def compute_after(self, mark: Any) -> None:
        """Let the calling thread's computation wait for a mark of this queue; the thread itself goes on."""
        ...

    def compute_mark(self) -> Any:
        """Return a mark for the end of what the calling thread's computation has been given."""
        ...

    def finish(self, mark: Any) -> None:
        """Wait in this thread for a mark of this queue."""
        ...


class CudaQueue:
    """A CUDA stream for copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kind = device_type(device)
        self._stream = self._kind.new_stream(device)

    def pinned(self, nbytes: int) -> Tensor:
        """Return page-locked memory."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, source: Tensor, out: Tensor) -> None:
        """Queue a copy on the stream."""
        with self._kind.on_stream(self._stream):
            out.copy_(source, non_blocking=True)

    def note(self) -> Any:
        """Record an event on the stream."""
        return self._stream.record_event()

    def wait_for(self, mark: Any) -> None:
        """Let the stream wait for an event."""
        self._stream.wait_event(mark)

    def compute_after(self, mark: Any) -> None:
        """Let the thread's current stream wait for an event."""
        self._kind.current_stream(self._device).wait_event(mark)

    def compute_mark(self) -> Any:
        """Record an event on the thread's current stream."""
        return self._kind.current_stream(self._device).record_event()

    def finish(self, mark: Any) -> None:
        """Wait for an event."""
        mark.synchronize()


@dataclass(eq=False)
class _Staging:
    """Two buffers of the host: one is read into while the other is sent."""

    buffers: list[Tensor]
    sent: list[Any] = field(default_factory=lambda: [None, None])
    turn: int = 0


class SideLane:
    """Sends weights to a device beside its computing, through two staging buffers for each thread that fills."""

    def __init__(self, device: torch.device, queue: Queue, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.device = device
        self._queue = queue
        self._chunk_bytes = chunk_bytes
        self._free: list[_Staging] = []

    def allocate(self, nbytes: int) -> Tensor:
        """Return memory of the device."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def can_lend(self, sources: Sequence[Source], *, rows_only: bool = False) -> bool:
        """Return False: devices compute with their own memory."""
        return False

    def gains_by_reading_ahead(self, sources: Sequence[Source]) -> bool:
        """Return True: copies run beside the computing."""
        return True

    def fill(self, jobs: Sequence[tuple[Source, Tensor]], marks: Sequence[Any]) -> Any:
        """Read through staging, and queue the copies; the ticket is a mark of the queue."""
        for source, _ in jobs:
            source.will_read()
        for mark in marks:
            self._queue.wait_for(mark)
        try:
            staging = self._free.pop()
        except IndexError:
            staging = _Staging([self._queue.pinned(self._chunk_bytes) for _ in range(2)])
        try:
            for source, out in jobs:
                if isinstance(source, HostTensor) and source.tensor.is_pinned() and source.tensor.dtype == out.dtype:
                    self._queue.copy(source.tensor, out)
                else:
                    self._stage(source, out, staging)
        finally:
            self._free.append(staging)
        return self._queue.note()

    def ready(self, ticket: Any) -> None:
        """Let the computation wait for the copies."""
        self._queue.compute_after(ticket)

    def mark(self, buffer: Tensor) -> Any:
        """Return a mark after which the buffer may be filled again."""
        kind = device_type(buffer.device)
        if kind.has_streams:  # should it be given back instead, the memory must wait too
            kind.record_use(buffer, kind.current_stream(buffer.device))
        return self._queue.compute_mark()

    def _stage(self, source: Source, out: Tensor, staging: _Staging) -> None:
        """Send a tensor chunk by chunk, converted to the dtype of ``out`` on the way."""
        flat = out.view(-1)
        per_chunk = max(1, self._chunk_bytes // out.dtype.itemsize)
        for begin in range(0, flat.numel(), per_chunk):
            count = min(per_chunk, flat.numel() - begin)
            staging.turn = 1 - staging.turn
            if staging.sent[staging.turn] is not None:
                self._queue.finish(staging.sent[staging.turn])
            part = staging.buffers[staging.turn][: count * out.dtype.itemsize].view(out.dtype)
            if isinstance(source, HostTensor):
                part.copy_(source.tensor.reshape(-1)[begin : begin + count])
            else:
                source.part(begin, count).read_into(part)
            self._queue.copy(part, flat[begin : begin + count])
            staging.sent[staging.turn] = self._queue.note()


def build_lane(device: torch.device) -> Lane:
    """Return the lane to a device."""
    kind = device_type(device)
    if kind.is_host:
        return HostLane()
    if kind.has_streams:
        return SideLane(device, CudaQueue(device))
    return SideLane(device, BlockingQueue())


class BlockingQueue:
    """Copies at once: for devices whose queues we do not know."""

    def pinned(self, nbytes: int) -> Tensor:
        """Return ordinary memory."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy(self, source: Tensor, out: Tensor) -> None:
        """Copy now."""
        out.copy_(source)

    def note(self) -> None:
        """Do nothing: all copies are over."""

    def wait_for(self, mark: None) -> None:
        """Do nothing: the device itself keeps the order of copies and computation."""

    def compute_after(self, mark: None) -> None:
        """Do nothing."""

    def compute_mark(self) -> None:
        """Do nothing."""

    def finish(self, mark: None) -> None:
        """Do nothing."""
