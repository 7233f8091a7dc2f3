"""Prefetch of batches to the device: `BatchPrefetcher` copies a batch while the previous one is trained on.

The copy is made by a `BatchTransfer`, which starts it and completes it later; `StreamTransfer` uses a separate
CUDA stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch

from accel_nb.data.order import BatchShare
from accel_nb.runtime.devices.base import Event
from accel_nb.runtime.devices.registry import device_type
from accel_nb.runtime.tensors.nested import find_tensors, map_tensors, to_device

BatchAndShare = tuple[Any, BatchShare]
"""A batch and its share of the global batch."""


class BatchTransfer(Protocol):
    """Asynchronous copies of batches to a device."""

    def start(self, batch: Any) -> Any:
        """Start the copy and return a handle for `finish`."""
        ...

    def finish(self, handle: Any) -> Any:
        """Return the batch, ready for use by the calling thread's computation."""
        ...


class _Copied(NamedTuple):
    batch: Any
    done: Event


class StreamTransfer:
    """Copies on a separate CUDA stream, concurrent with the work that is queued on the current stream afterwards.

    ``pins`` copies through page-locked memory, without which the copy is not asynchronous; not needed for a loader with
    ``pin_memory=True``.
    """

    def __init__(self, device: torch.device, *, pins: bool) -> None:
        self._device = device
        self._pins = pins
        self._kind = device_type(device)
        self._stream = self._kind.new_stream(device)

    def start(self, batch: Any) -> _Copied:
        """Queue the copy on the side stream, after the work that the current stream has by now.

        An object that moves itself may have tensors that cannot be found for `record_use`: the memory of an earlier
        batch, which the copy may reuse, is then no longer read.
        """
        if self._pins:
            batch = map_tensors(_pinned, batch)
        self._stream.wait_event(self._kind.current_stream(self._device).record_event())
        with self._kind.on_stream(self._stream):
            moved = to_device(batch, self._device, non_blocking=True)
            return _Copied(moved, self._stream.record_event())

    def finish(self, handle: _Copied) -> Any:
        """Make the current stream wait for the copy; does not block the process."""
        current = self._kind.current_stream(self._device)
        current.wait_event(handle.done)
        for tensor in find_tensors(handle.batch):
            # Its memory was allocated on the copy stream, which must not reuse it before the current stream has ended.
            if device_type(tensor.device) is self._kind:
                self._kind.record_use(tensor, current)
        return handle.batch


class BatchPrefetcher(Iterator[BatchAndShare]):
    """Yields the pairs of ``source``; the copy of the next one is started before one is yielded.

    An error of the source is raised in place of the batch that failed.
    """

    def __init__(self, source: Iterator[BatchAndShare], transfer: BatchTransfer) -> None:
        self._source = source
        self._transfer = transfer
        self._waiting: list[tuple[Any, BatchShare] | BaseException] = []

    def __next__(self) -> BatchAndShare:
        waiting = self._waiting
        if not waiting:
            self._start_next()
        ready = waiting.pop()
        if isinstance(ready, BaseException):
            raise ready
        self._start_next()
        handle, share = ready
        return self._transfer.finish(handle), share

    def _start_next(self) -> None:
        try:
            batch, share = next(self._source)
            self._waiting.append((self._transfer.start(batch), share))
        except Exception as error:
            self._waiting.append(error)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory() if tensor.is_cpu and not tensor.is_pinned() else tensor
