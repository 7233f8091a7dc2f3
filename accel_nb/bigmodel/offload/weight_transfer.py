"""Transfer of weights from files and host memory to the memory that a device computes from.

A `WeightTransfer` fills buffers in a reader thread and synchronizes them with the computing thread. `HostTransfer` maps
pages of files, or reads them into memory. `DeviceTransfer` copies through page-locked memory on a `CopyQueue`, such as
a CUDA stream.
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
from accel_nb.bigmodel.offload import mmap_weights
from accel_nb.bigmodel.offload.mmap_weights import PageLease
from accel_nb.bigmodel.safetensors_reader import CHUNK_BYTES, FileTensor
from accel_nb.runtime.devices.registry import device_type

_MAX_THREADS = 8
_DISK_THREADS = 4
"""Concurrent reads that saturate a disk; threads that wait for it do not occupy a core."""


class HostTensor:
    """A weight in host memory."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that it is stored in."""
        return self.tensor.dtype

    def is_in_memory(self) -> bool:
        """Return True."""
        return True

    def advise_read(self) -> None:
        """Do nothing: it is in memory."""

    def read_into(self, out: Tensor) -> None:
        """Copy into ``out``, converted to its dtype."""
        out.copy_(self.tensor)


WeightSource = FileTensor | HostTensor


class WeightTransfer(Protocol):
    """Fills buffers with weights; the methods are in the order in which they are called for a buffer."""

    @property
    def device(self) -> torch.device:
        """The device of the buffers."""
        ...

    def allocate(self, nbytes: int) -> Tensor:
        """Return a new buffer of bytes."""
        ...

    def can_lease(self, sources: Sequence[WeightSource], *, reads_few_rows: bool = False) -> bool:
        """Return whether kernels can use tensors in place, without a buffer; `lease_weights` returns them then.

        ``reads_few_rows``: only few rows of each are looked up.
        """
        ...

    def benefits_from_prefetch(self, sources: Sequence[WeightSource]) -> bool:
        """Return whether filling a buffer during the computation is faster than right before its use."""
        ...

    def fill(self, jobs: Sequence[tuple[WeightSource, Tensor]], events: Sequence[Any]) -> Any:
        """Fill parts of a buffer after the events; return a handle for `wait`. Any thread may call."""
        ...

    def wait(self, handle: Any) -> None:
        """Make the computation that the calling thread queues from now on wait for the fill."""
        ...

    def record_use(self, buffer: Tensor) -> Any:
        """Return an event for the computation that the calling thread has queued on a buffer, or None."""
        ...


def lease_weights(sources: Sequence[WeightSource], *, reads_few_rows: bool = False) -> PageLease:
    """Return weights in place: mapped pages of files, or host memory; requires `can_lease`. Any thread may call."""
    page_lease = mmap_weights.lease_pages(
        [source for source in sources if isinstance(source, FileTensor)], reads_few_rows=reads_few_rows
    )
    pages = iter(page_lease.tensors)
    page_lease.tensors = [next(pages) if isinstance(source, FileTensor) else source.tensor for source in sources]
    return page_lease


class HostTransfer:
    """Maps pages of files for the CPU, or reads into memory; a filled buffer can be used at once.

    Reads from the page cache are copies, which compete with the computation for cores. They are therefore made right
    before the computation, by as many threads as torch computes with.
    """

    device = torch.device("cpu")

    def __init__(self, num_threads: int | None = None) -> None:
        self._num_threads = num_threads or min(_MAX_THREADS, torch.get_num_threads())

    def allocate(self, nbytes: int) -> Tensor:
        """Return memory in huge pages where the system supports them."""
        return empty_tensors([((nbytes,), torch.uint8)])[0]

    def can_lease(self, sources: Sequence[WeightSource], *, reads_few_rows: bool = False) -> bool:
        """Return whether mapped pages of the files, if any, can replace memory."""
        return mmap_weights.can_lease(
            [source for source in sources if isinstance(source, FileTensor)], reads_few_rows=reads_few_rows
        )

    def benefits_from_prefetch(self, sources: Sequence[WeightSource]) -> bool:
        """Return whether a disk must be read, which occupies no core."""
        return not mmap_weights.are_cached([source for source in sources if isinstance(source, FileTensor)])

    def fill(self, jobs: Sequence[tuple[WeightSource, Tensor]], events: Sequence[Any]) -> None:
        """Read now; the calling thread is one of the readers."""
        on_disk = [source for source, _ in jobs if not source.is_in_memory()]
        for source in on_disk:
            source.advise_read()
        num_threads = max(self._num_threads, _DISK_THREADS) if on_disk else self._num_threads
        parts = deque(_parts(jobs))
        num_helpers = min(num_threads - 1, sum(out.nbytes for _, out in jobs) // CHUNK_BYTES)
        _read_with(num_helpers, parts)

    def wait(self, handle: None) -> None:
        """Do nothing."""

    def record_use(self, buffer: Tensor) -> None:
        """Do nothing: computation on the CPU is synchronous."""


def _parts(jobs: Sequence[tuple[WeightSource, Tensor]]) -> Iterator[tuple[WeightSource, Tensor]]:
    """Divide tensors that are read without conversion into chunks."""
    for source, out in jobs:
        if isinstance(source, HostTensor) or source.dtype != out.dtype:
            yield source, out
            continue
        flat = out.view(-1)
        per_part = CHUNK_BYTES // out.dtype.itemsize
        for begin in range(0, flat.numel(), per_part):
            count = min(per_part, flat.numel() - begin)
            yield source.slice(begin, count), flat[begin : begin + count]


def _read_with(num_helpers: int, parts: deque[tuple[WeightSource, Tensor]]) -> None:
    """Read parts in this thread and helper threads; no helper writes to memory after the return."""
    failures: list[Exception] = []

    def help_reading() -> None:
        try:
            _read(parts)
        except Exception as error:
            failures.append(error)
            parts.clear()

    helpers: list[threading.Thread] = []
    try:
        with suppress(RuntimeError):  # a memory limit may prevent the start of a thread
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


def _read(parts: deque[tuple[WeightSource, Tensor]]) -> None:
    """Read parts until none is left."""
    while True:
        try:
            source, out = parts.popleft()
        except IndexError:
            return
        source.read_into(out)


class CopyQueue(Protocol):
    """Copies to a device in the order of the calls, concurrent with its computation."""

    def allocate_pinned(self, nbytes: int) -> Tensor:
        """Return host memory from which copies are asynchronous."""
        ...

    def copy(self, source: Tensor, out: Tensor) -> None:
        """Queue a copy to the device."""
        ...

    def record_copies(self) -> Any:
        """Return an event for the end of all queued copies."""
        ...

    def copy_after(self, event: Any) -> None:
        """Order later copies after an event of the computation."""
        ...

    def compute_after(self, event: Any) -> None:
        """Order the calling thread's computation after an event of this queue; does not block the thread."""
        ...

    def record_compute(self) -> Any:
        """Return an event for the end of the computation that the calling thread has queued."""
        ...

    def synchronize(self, event: Any) -> None:
        """Block until an event of this queue."""
        ...


class CudaCopyQueue:
    """A CUDA stream for copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kind = device_type(device)
        self._stream = self._kind.new_stream(device)

    def allocate_pinned(self, nbytes: int) -> Tensor:
        """Return page-locked memory."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True, device="cpu")

    def copy(self, source: Tensor, out: Tensor) -> None:
        """Queue a copy on the stream."""
        with self._kind.on_stream(self._stream):
            out.copy_(source, non_blocking=True)

    def record_copies(self) -> Any:
        """Record an event on the stream."""
        return self._stream.record_event()

    def copy_after(self, event: Any) -> None:
        """Make the stream wait for an event."""
        self._stream.wait_event(event)

    def compute_after(self, event: Any) -> None:
        """Make the thread's current stream wait for an event."""
        self._kind.current_stream(self._device).wait_event(event)

    def record_compute(self) -> Any:
        """Record an event on the thread's current stream."""
        return self._kind.current_stream(self._device).record_event()

    def synchronize(self, event: Any) -> None:
        """Block until an event."""
        event.synchronize()


@dataclass(eq=False)
class _Staging:
    """Two host buffers: one is filled while the other is copied to the device."""

    buffers: list[Tensor]
    sent: list[Any] = field(default_factory=lambda: [None, None])
    index: int = 0


class DeviceTransfer:
    """Copies weights to a device during its computation, through two staging buffers per filling thread."""

    def __init__(self, device: torch.device, queue: CopyQueue, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.device = device
        self._queue = queue
        self._chunk_bytes = chunk_bytes
        self._free: list[_Staging] = []

    def allocate(self, nbytes: int) -> Tensor:
        """Return device memory."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def can_lease(self, sources: Sequence[WeightSource], *, reads_few_rows: bool = False) -> bool:
        """Return False: devices compute from their own memory."""
        return False

    def benefits_from_prefetch(self, sources: Sequence[WeightSource]) -> bool:
        """Return True: copies run concurrently with the computation."""
        return True

    def fill(self, jobs: Sequence[tuple[WeightSource, Tensor]], events: Sequence[Any]) -> Any:
        """Read into staging buffers and queue the copies; the handle is an event of the queue."""
        for source, _ in jobs:
            source.advise_read()
        for event in events:
            self._queue.copy_after(event)
        try:
            staging = self._free.pop()
        except IndexError:
            staging = _Staging([self._queue.allocate_pinned(self._chunk_bytes) for _ in range(2)])
        try:
            for source, out in jobs:
                if isinstance(source, HostTensor) and source.tensor.is_pinned() and source.tensor.dtype == out.dtype:
                    self._queue.copy(source.tensor, out)
                else:
                    self._stage(source, out, staging)
        finally:
            self._free.append(staging)
        return self._queue.record_copies()

    def wait(self, handle: Any) -> None:
        """Order the computation after the copies."""
        self._queue.compute_after(handle)

    def record_use(self, buffer: Tensor) -> Any:
        """Return an event after which the buffer may be filled again."""
        kind = device_type(buffer.device)
        if kind.has_streams:  # if it is freed instead, the allocator must wait too
            kind.record_use(buffer, kind.current_stream(buffer.device))
        return self._queue.record_compute()

    def _stage(self, source: WeightSource, out: Tensor, staging: _Staging) -> None:
        """Copy a tensor chunk by chunk, converted to the dtype of ``out`` in the staging buffer."""
        flat = out.view(-1)
        per_chunk = max(1, self._chunk_bytes // out.dtype.itemsize)
        for begin in range(0, flat.numel(), per_chunk):
            count = min(per_chunk, flat.numel() - begin)
            staging.index = 1 - staging.index
            if staging.sent[staging.index] is not None:
                self._queue.synchronize(staging.sent[staging.index])
            part = staging.buffers[staging.index][: count * out.dtype.itemsize].view(out.dtype)
            if isinstance(source, HostTensor):
                part.copy_(source.tensor.reshape(-1)[begin : begin + count])
            else:
                source.slice(begin, count).read_into(part)
            self._queue.copy(part, flat[begin : begin + count])
            staging.sent[staging.index] = self._queue.record_copies()


def build_transfer(device: torch.device) -> WeightTransfer:
    """Return the transfer for a device."""
    kind = device_type(device)
    if kind.is_host:
        return HostTransfer()
    if kind.has_streams:
        return DeviceTransfer(device, CudaCopyQueue(device))
    return DeviceTransfer(device, SynchronousCopyQueue())


class SynchronousCopyQueue:
    """Copies synchronously, for devices without support for asynchronous copies here."""

    def allocate_pinned(self, nbytes: int) -> Tensor:
        """Return pageable memory."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def copy(self, source: Tensor, out: Tensor) -> None:
        """Copy now."""
        out.copy_(source)

    def record_copies(self) -> None:
        """Do nothing: all copies have ended."""

    def copy_after(self, event: None) -> None:
        """Do nothing: the device itself keeps the order of copies and computation."""

    def compute_after(self, event: None) -> None:
        """Do nothing."""

    def record_compute(self) -> None:
        """Do nothing."""

    def synchronize(self, event: None) -> None:
        """Do nothing."""
