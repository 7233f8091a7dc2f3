"""Payloads in anonymous shared memory: a message contains file descriptors and a table, never the bytes.

`SharedBuffers` is written once and mapped copy-on-write by each reader. `SharedRegion` is mapped by both processes.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accel_nb.pool.channel import Channel, ChannelError
from accel_nb.pool.messages import decode, encode
from accel_nb.pool.payload import BufferPayload, Payload, Payloads, RegionPayload, close_all
from accel_nb.runtime.process.memfd import is_sealed, seal_size

_ALIGN = 64
COPY_BELOW = 1024 * 1024
"""A payload of fewer bytes in total is copied on arrival instead of mapped."""


def _aligned(offset: int) -> int:
    return (offset + _ALIGN - 1) // _ALIGN * _ALIGN


@dataclass(frozen=True, slots=True)
class SharedBuffers(BufferPayload):
    """A header and buffers in one memory file; ``buffers`` are ``(offset, size)`` pairs in bytes."""

    descriptor: int
    header_bytes: int
    buffers: tuple[tuple[int, int], ...]

    @classmethod
    def write(cls, header: bytes, buffers: Sequence[memoryview]) -> SharedBuffers:
        """Write into a new memory file, by system calls: these allocate new pages faster than a mapping does."""
        descriptor = os.memfd_create("accel_nb_payload", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            table: list[tuple[int, int]] = []
            _write_all(descriptor, memoryview(header), 0)
            offset = _aligned(len(header))
            for buffer in buffers:
                _write_all(descriptor, buffer, offset)
                table.append((offset, buffer.nbytes))
                offset = _aligned(offset + buffer.nbytes)
            os.ftruncate(descriptor, max(offset, 1))
            seal_size(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor, len(header), tuple(table))

    def table(self) -> dict[str, Any]:
        """Return the description that a message contains beside the descriptor."""
        return {"kind": "buffers", "header_bytes": self.header_bytes, "buffers": self.buffers}

    @classmethod
    def from_table(cls, descriptor: int, table: Mapping[str, Any]) -> SharedBuffers:
        """Return the payload that a message describes.

        Raises ValueError if the table does not fit the memory file, or if the file is not sealed against shrinking.
        """
        size = os.fstat(descriptor).st_size
        try:
            payload = cls(descriptor, int(table["header_bytes"]), tuple((int(a), int(n)) for a, n in table["buffers"]))
        except (TypeError, KeyError, ValueError, OverflowError):
            raise ValueError("the table of a payload is not one of offsets and sizes") from None
        parts = ((0, payload.header_bytes), *payload.buffers)
        if any(start < 0 or length < 0 or start + length > size for start, length in parts):
            raise ValueError(f"the table of a payload does not fit its memory of {size} bytes")
        if not is_sealed(descriptor):
            raise ValueError("the memory of a payload is not sealed")
        return payload

    def read(self) -> tuple[bytes, list[memoryview]]:
        """Return header and writable buffers: copies when small, else a private copy-on-write mapping."""
        size = os.fstat(self.descriptor).st_size
        if size < COPY_BELOW:
            memory = memoryview(bytearray(os.pread(self.descriptor, size, 0)))
        else:
            memory = memoryview(mmap.mmap(self.descriptor, 0, flags=mmap.MAP_PRIVATE))
        return bytes(memory[: self.header_bytes]), [memory[start : start + n] for start, n in self.buffers]

    def close(self) -> None:
        """Close the descriptor; existing mappings stay valid."""
        os.close(self.descriptor)


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    data = data.cast("B") if data.nbytes else data
    done = 0
    while done < data.nbytes:
        done += os.pwrite(descriptor, data[done:], offset + done)


class SharedRegion(RegionPayload):
    """A memory file that a worker creates and fills, and that the kernel maps and reads."""

    def __init__(self, descriptor: int, used_bytes: int | None = None) -> None:
        if not is_sealed(descriptor):
            raise ValueError("the memory of returned weights is not sealed")
        size = os.fstat(descriptor).st_size
        self.descriptor = descriptor
        self.used_bytes = size if used_bytes is None else used_bytes
        if not 0 <= self.used_bytes <= size:
            raise ValueError(f"{self.used_bytes} bytes of weights do not fit their memory of {size} bytes")
        self._mapping: mmap.mmap | None = None

    @classmethod
    def create(cls, num_bytes: int) -> SharedRegion:
        """Create a region of at least ``num_bytes`` bytes."""
        descriptor = os.memfd_create("accel_nb_return", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, max(_aligned(num_bytes), mmap.PAGESIZE))
        seal_size(descriptor)
        return cls(descriptor)

    def table(self) -> dict[str, Any]:
        """Return the description that a message contains beside the descriptor."""
        return {"kind": "region", "used_bytes": self.used_bytes}

    @property
    def identity(self) -> Hashable:
        """Device and inode of the memory file."""
        status = os.fstat(self.descriptor)
        return status.st_dev, status.st_ino

    @property
    def memory(self) -> mmap.mmap:
        """The shared mapping, created on first access."""
        if self._mapping is None:
            self._mapping = mmap.mmap(self.descriptor, 0)
        return self._mapping

    @property
    def num_bytes(self) -> int:
        """The size of the memory file."""
        return len(self.memory)

    def share(self, used_bytes: int) -> SharedRegion:
        """Return another descriptor of the memory file."""
        return SharedRegion(os.dup(self.descriptor), used_bytes)

    def close(self) -> None:
        """Close the descriptor; the mapping is freed with its last view."""
        self._mapping = None
        os.close(self.descriptor)


@dataclass(frozen=True, slots=True)
class StoreFile(Payload):
    """The anonymous file of the `FileStore` that the ranks open for a process group."""

    descriptor: int

    def table(self) -> dict[str, Any]:
        """Return the description that a message contains beside the descriptor."""
        return {"kind": "store"}

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.descriptor)


SharedPayload = SharedBuffers | SharedRegion | StoreFile


class SharedPayloads:
    """The factory of payloads of the local engine."""

    def write(self, header: bytes, buffers: Sequence[memoryview]) -> SharedBuffers:
        """Write header and buffers into a new memory file."""
        return SharedBuffers.write(header, buffers)

    def reserve(self, num_bytes: int) -> SharedRegion:
        """Create a region of at least ``num_bytes`` bytes."""
        return SharedRegion.create(num_bytes)


def send_record(channel: Channel, record: object, payloads: Payloads, *, waits: bool = True) -> None:
    """Send a record with its payloads, which the caller closes.

    Raise the errors of `Channel.send`, and TypeError for a payload of another engine.
    """
    message, descriptors = encode(record), []
    if payloads:
        tables: dict[str, Any] = {}
        for name, payload in payloads.items():
            if not isinstance(payload, SharedPayload):
                raise TypeError(f"the payload {name!r} is a {type(payload).__name__}; the local engine cannot send it")
            tables[name] = payload.table()
            descriptors.append(payload.descriptor)
        message["payloads"] = tables
    channel.send(message, descriptors, waits=waits)


def receive_record(channel: Channel) -> tuple[Any, dict[str, Payload]]:
    """Wait for a record and its payloads, which the caller must close.

    Raises ChannelError for an invalid message, and EOFError if the other process has closed the channel.
    """
    message, descriptors = channel.receive()
    payloads: dict[str, Payload] = {}
    try:
        tables = message.pop("payloads", {})
        if not isinstance(tables, dict) or len(tables) != len(descriptors):
            raise ChannelError(f"a message with {len(descriptors)} descriptors does not describe as many payloads")
        record = decode(message)
        for name, table in tables.items():
            payloads[name] = _rebuild(descriptors[0], table)
            del descriptors[0]
        return record, payloads
    except BaseException:
        close_all(payloads.values())
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def _rebuild(descriptor: int, table: Any) -> SharedPayload:
    kind = table.get("kind") if isinstance(table, dict) else None
    try:
        if kind == "buffers":
            return SharedBuffers.from_table(descriptor, table)
        if kind == "region":
            return SharedRegion(descriptor, int(table["used_bytes"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ChannelError(f"a payload is described wrongly: {error}") from None
    if kind == "store":
        return StoreFile(descriptor)
    raise ChannelError("a payload is of an unknown kind")
