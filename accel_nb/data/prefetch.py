"""Getting batches to the device: at once, or ahead of time on a stream of their own.

A *lane* starts a copy and finishes it later. `Ahead` keeps one batch on its lane while the one before it is trained on;
it knows nothing of devices, so what it does is the same on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch

from accel_nb.data.order import Share
from accel_nb.runtime.devices.base import Event
from accel_nb.runtime.devices.registry import device_type
from accel_nb.runtime.tensors.nested import find_tensors, map_tensors, to_device

Pair = tuple[Any, Share]
"""A batch and what it is of its global batch."""


class Lane(Protocol):
    """A way of copying batches that takes time."""

    def start(self, batch: Any) -> Any:
        """Start the copy and return at once; the result is for `finish`."""
        ...

    def finish(self, ticket: Any) -> Any:
        """Return the batch, ready for whatever the caller does with it next."""
        ...


class _Copied(NamedTuple):
    batch: Any
    done: Event


class SideStream:
    """Copies on a CUDA stream of its own, beside what the current stream computes.

    ``pins`` copies through page-locked memory, without which the copy is no faster than an ordinary one; a loader with
    ``pin_memory=True`` has done that already.
    """

    def __init__(self, device: torch.device, *, pins: bool) -> None:
        self._device = device
        self._pins = pins
        self._kind = device_type(device)
        self._stream = self._kind.new_stream(device)

    def start(self, batch: Any) -> _Copied:
        """Queue the copy on the side stream."""
        if self._pins:
            batch = map_tensors(_pinned, batch)
        with self._kind.on_stream(self._stream):
            moved = to_device(batch, self._device, non_blocking=True)
            return _Copied(moved, self._stream.record_event())

    def finish(self, ticket: _Copied) -> Any:
        """Let the current stream wait for the copy; this process does not wait."""
        current = self._kind.current_stream(self._device)
        current.wait_event(ticket.done)
        for tensor in find_tensors(ticket.batch):
            # Its memory belongs to the side stream, which must not use it again before this one is done with it.
            if device_type(tensor.device) is self._kind:
                self._kind.record_use(tensor, current)
        return ticket.batch


class Ahead(Iterator[Pair]):
    """Yields the pairs of ``source``, of which the next one is already on its lane when one is given out.

    An error of the source comes where the batch that failed would have come.
    """

    def __init__(self, source: Iterator[Pair], lane: Lane) -> None:
        self._source = source
        self._lane = lane
        self._waiting: list[tuple[Any, Share] | BaseException] = []

    def __next__(self) -> Pair:
        waiting = self._waiting
        if not waiting:
            self._start_next()
        present = waiting.pop()
        if isinstance(present, BaseException):
            raise present
        self._start_next()
        ticket, share = present
        return self._lane.finish(ticket), share

    def _start_next(self) -> None:
        try:
            batch, share = next(self._source)
            self._waiting.append((self._lane.start(batch), share))
        except (StopIteration, Exception) as error:
            self._waiting.append(error)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory() if tensor.is_cpu and not tensor.is_pinned() else tensor
