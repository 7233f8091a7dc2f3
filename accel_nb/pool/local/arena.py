"""Anonymous shared memory for bulk data: a message carries the descriptor and a table, never the bytes.

`Parcel` is one pickle stream with its out-of-band buffers, written once and mapped copy-on-write by each reader.
`ReturnArena` is one region that a worker writes and the kernel reads again and again: touching fresh pages costs
several times more than copying, so it is kept and only ever grows.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from accel_nb.runtime.process.memfd import is_sealed, seal_size

_ALIGN = 64
COPY_BELOW = 1024 * 1024
"""Parcels smaller than this many bytes are copied on arrival instead of mapped."""


def _aligned(offset: int) -> int:
    return (offset + _ALIGN - 1) // _ALIGN * _ALIGN


@dataclass(frozen=True, slots=True)
class Parcel:
    """A pickle stream and where its buffers lie: ``(offset, size)`` pairs in bytes."""

    descriptor: int
    stream_bytes: int
    buffers: tuple[tuple[int, int], ...]

    @classmethod
    def write(cls, stream: bytes, buffers: Sequence[memoryview]) -> Parcel:
        """Write into fresh anonymous memory; ``write`` calls fault new pages faster than a mapping does."""
        descriptor = os.memfd_create("accel_nb_parcel", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            table: list[tuple[int, int]] = []
            _write_all(descriptor, memoryview(stream), 0)
            offset = _aligned(len(stream))
            for buffer in buffers:
                _write_all(descriptor, buffer, offset)
                table.append((offset, buffer.nbytes))
                offset = _aligned(offset + buffer.nbytes)
            os.ftruncate(descriptor, max(offset, 1))
            seal_size(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor, len(stream), tuple(table))

    def table(self) -> dict[str, Any]:
        """Return what a message must say beside the descriptor."""
        return {"stream_bytes": self.stream_bytes, "buffers": self.buffers}

    @classmethod
    def from_table(cls, descriptor: int, table: dict[str, Any]) -> Parcel:
        """Rebuild from a message; raises ValueError when the table does not fit the memory, or that could shrink."""
        size = os.fstat(descriptor).st_size
        try:
            parcel = cls(descriptor, int(table["stream_bytes"]), tuple((int(a), int(n)) for a, n in table["buffers"]))
        except (TypeError, KeyError, OverflowError):
            raise ValueError("the table of a parcel is not one of offsets and sizes") from None
        places = ((0, parcel.stream_bytes), *parcel.buffers)
        if any(start < 0 or length < 0 or start + length > size for start, length in places):
            raise ValueError(f"the table of a parcel does not fit its memory of {size} bytes")
        if not is_sealed(descriptor):
            raise ValueError("the memory of a parcel is not sealed")
        return parcel

    def read(self) -> tuple[bytes, list[memoryview]]:
        """Return stream and writable buffers: private copies when small, else a private copy-on-write mapping."""
        size = os.fstat(self.descriptor).st_size
        if size < COPY_BELOW:
            memory = memoryview(bytearray(os.pread(self.descriptor, size, 0)))
        else:
            memory = memoryview(mmap.mmap(self.descriptor, 0, flags=mmap.MAP_PRIVATE))
        return bytes(memory[: self.stream_bytes]), [memory[start : start + n] for start, n in self.buffers]

    def close(self) -> None:
        """Close the descriptor; mappings stay."""
        os.close(self.descriptor)


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    data = data.cast("B") if data.nbytes else data
    done = 0
    while done < data.nbytes:
        done += os.pwrite(descriptor, data[done:], offset + done)


class ReturnArena:
    """A region of anonymous memory shared by a worker, which makes and fills it, and the kernel, which reads it."""

    def __init__(self, descriptor: int) -> None:
        if not is_sealed(descriptor):
            raise ValueError("the memory that weights come back in is not sealed")
        self.descriptor = descriptor
        self.memory = mmap.mmap(descriptor, 0)

    @classmethod
    def create(cls, num_bytes: int) -> ReturnArena:
        """Make a region of at least ``num_bytes`` bytes."""
        descriptor = os.memfd_create("accel_nb_return", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, max(_aligned(num_bytes), mmap.PAGESIZE))
        seal_size(descriptor)
        return cls(descriptor)

    @property
    def num_bytes(self) -> int:
        """The size of the region."""
        return len(self.memory)

    def close(self) -> None:
        """Close the descriptor; the mapping goes when the last view of it does."""
        os.close(self.descriptor)
