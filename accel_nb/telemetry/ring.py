"""A ring buffer of fixed-size event records in shared anonymous memory: one worker writes, the kernel reads.

Writing never blocks and makes no system call. When the ring is full, the oldest records are overwritten, and the reader
counts the records that it missed. The kernel keeps the memory mapped after the worker has ended, so it can still read
the last records of a killed worker.

Layout: a 64-byte header, whose first u64 is the number of records ever written, then ``capacity`` slots of 96 bytes:
u64 sequence (1-based), u32 kind, u32 rank, then ten f64 fields. A step has seven fields, and the name of its curve as
24 bytes of UTF-8; a logged value has three, and its name as 56 bytes. A slot is written before the header's count.
"""

from __future__ import annotations

import mmap
import os
import struct

from accel_nb.runtime.process.memfd import seal_size
from accel_nb.telemetry.events import EpochBegan, Event, MemorySample, MetricLogged, StepDone, TimeUsed

_HEADER = struct.Struct("<Q")
_HEADER_BYTES = 64
_SLOT = struct.Struct("<QII10d")
_NAME_BYTES = 56
_NAMED_SLOT = struct.Struct(f"<QII3d{_NAME_BYTES}s")
_CURVE_BYTES = 24
_STEP_SLOT = struct.Struct(f"<QII7d{_CURVE_BYTES}s")
_STEP, _MEMORY, _METRIC, _EPOCH, _TIME = 1, 2, 3, 4, 5
DEFAULT_CAPACITY = 4096


def ring_bytes(capacity: int = DEFAULT_CAPACITY) -> int:
    """Return the size of the shared memory for ``capacity`` records, in bytes."""
    return _HEADER_BYTES + capacity * _SLOT.size


def create_ring(capacity: int = DEFAULT_CAPACITY) -> int:
    """Create the anonymous memory of a ring and return its file descriptor."""
    descriptor = os.memfd_create("accel_nb_ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, ring_bytes(capacity))
    seal_size(descriptor)
    return descriptor


class RingWriter:
    """The worker's side of the ring: writes numeric events."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, 0)
        self._capacity = (len(self._memory) - _HEADER_BYTES) // _SLOT.size
        (self._count,) = _HEADER.unpack_from(self._memory, 0)

    @staticmethod
    def can_write(event: Event) -> bool:
        """Return whether the event can be written: it is numeric, or a logged value whose name fits into a slot."""
        if isinstance(event, MetricLogged):
            return _fits(_encode(event.name))
        return isinstance(event, StepDone | MemorySample | EpochBegan | TimeUsed)

    def write_step(
        self, rank: int, step: int, time: float, loss: float, learning_rate: float, step_s: float, num_samples: int,
        skipped: bool, curve: str = "",
    ) -> None:  # fmt: skip
        """Write the record of a `StepDone` with these fields; creates no event object, since it runs in every step."""
        offset = _HEADER_BYTES + (self._count % self._capacity) * _SLOT.size
        self._count += 1
        _STEP_SLOT.pack_into(
            self._memory, offset, self._count, _STEP, rank, step, time, loss, learning_rate, step_s, num_samples,
            skipped, curve.encode(),
        )  # fmt: skip
        _HEADER.pack_into(self._memory, 0, self._count)

    def write_metric(self, rank: int, step: int, time: float, name: str, value: float) -> bool:
        """Write the record of a `MetricLogged` with these fields if its name fits; return whether it does."""
        encoded = _encode(name)
        if not _fits(encoded):
            return False
        offset = _HEADER_BYTES + (self._count % self._capacity) * _SLOT.size
        self._count += 1
        _NAMED_SLOT.pack_into(self._memory, offset, self._count, _METRIC, rank, step, time, value, encoded)
        _HEADER.pack_into(self._memory, 0, self._count)
        return True

    def write(self, event: StepDone | MemorySample | MetricLogged | EpochBegan | TimeUsed) -> None:
        """Write the record of an event that `can_write` accepts; a full ring overwrites the oldest record."""
        if isinstance(event, MetricLogged):
            self.write_metric(event.rank, event.step, event.time, event.name, event.value)
            return
        if isinstance(event, StepDone):
            self.write_step(
                event.rank, event.step, event.time, event.loss, event.learning_rate, event.step_s, event.num_samples,
                event.skipped, event.curve,
            )  # fmt: skip
            return
        offset = _HEADER_BYTES + (self._count % self._capacity) * _SLOT.size
        self._count += 1
        if isinstance(event, EpochBegan):
            kind, values = _EPOCH, (event.step, event.time, event.num_steps, event.loader, event.epoch, *[0.0] * 5)
        elif isinstance(event, TimeUsed):
            durations = event.reading_s, event.computing_s, event.blocked_s, event.queued_s
            kind, values = _TIME, (event.step, event.time, *durations, *[0.0] * 4)
        else:
            kind, values = _MEMORY, _memory_values(event)
        _SLOT.pack_into(self._memory, offset, self._count, kind, event.rank, *values)
        _HEADER.pack_into(self._memory, 0, self._count)

    def close(self) -> None:
        """Unmap the ring."""
        self._memory.close()


class RingReader:
    """The kernel's side of the ring: reads records; ``num_missed`` counts those that were overwritten before."""

    def __init__(self, descriptor: int) -> None:
        self.num_read = 0
        self.num_missed = 0
        self._descriptor = descriptor
        self._memory = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        self._capacity = (len(self._memory) - _HEADER_BYTES) // _SLOT.size

    def read(self) -> list[Event]:
        """Return the records written since the last call, oldest first."""
        (written,) = _HEADER.unpack_from(self._memory, 0)
        first = max(self.num_read, written - self._capacity)
        self.num_missed += first - self.num_read
        events: list[Event] = []
        for index in range(first, written):
            offset = _HEADER_BYTES + (index % self._capacity) * _SLOT.size
            sequence, kind, rank, *values = _SLOT.unpack_from(self._memory, offset)
            event = None
            if sequence == index + 1:
                event = _unpack_named(self._memory, offset, kind) or _unpack(kind, rank, values)
            if event is not None:
                events.append(event)
            else:
                self.num_missed += 1
        self.num_read = written
        return events

    def close(self) -> None:
        """Unmap the ring and close its descriptor."""
        self._memory.close()
        os.close(self._descriptor)


def _encode(name: str) -> bytes:
    """Return a name as UTF-8, which has no bytes for half of a surrogate pair: they are written as escapes."""
    return name.encode(errors="backslashreplace")


def _fits(name: bytes) -> bool:
    return len(name) <= _NAME_BYTES and not name.endswith(b"\0")


def _unpack_named(memory: mmap.mmap, offset: int, kind: int) -> Event | None:
    """Return the event of a slot that contains a name; None for a slot of another kind or with invalid content."""
    try:
        if kind == _METRIC:
            _, _, rank, step, time, value, name = _NAMED_SLOT.unpack_from(memory, offset)
            return MetricLogged(rank, int(step), time, _text(name), value)
        if kind == _STEP:
            _, _, rank, step, time, loss, rate, step_s, num_samples, skipped, name = _STEP_SLOT.unpack_from(
                memory, offset
            )
            return StepDone(rank, int(step), time, loss, rate, step_s, int(num_samples), bool(skipped), _text(name))
    except (ValueError, OverflowError):  # a count that is NaN or infinite
        return None
    return None


def _text(name: bytes) -> str:
    return name.rstrip(b"\0").decode(errors="replace")


def _memory_values(event: MemorySample) -> tuple[float, ...]:
    return (
        event.step, event.time, event.parameters, event.gradients, event.optimizer, event.other, event.cached,
        event.free, 0.0, 0.0,
    )  # fmt: skip


def _unpack(kind: int, rank: int, values: list[float]) -> Event | None:
    """Return the event of a slot that contains numbers only; None for invalid content."""
    step, time, *amounts = values[:8]
    try:
        if kind == _EPOCH:
            return EpochBegan(rank, int(step), time, *(int(amount) for amount in amounts[:3]))
        if kind == _TIME:
            return TimeUsed(rank, int(step), time, *amounts[:4])
        if kind != _MEMORY:
            return None
        return MemorySample(rank, int(step), time, *(int(amount) for amount in amounts))
    except (ValueError, OverflowError):  # a count that is NaN or infinite
        return None
