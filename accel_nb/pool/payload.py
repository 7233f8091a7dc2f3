"""Bulk data sent with a record: serialized values and weights. Pool and session do not interpret it.

An engine determines where the bytes of a payload are stored and how they are transferred. Its `PayloadFactory`
allocates this storage directly, so that a payload is written once. Each payload of a record has a name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, TypeVar


class Payload(ABC):
    """Data in the storage of an engine; its owner closes it once."""

    @abstractmethod
    def close(self) -> None:
        """Release the storage; memory that `BufferPayload.read` returned stays valid."""


class BufferPayload(Payload):
    """A header and buffers, written once: a pickle stream with its out-of-band buffers."""

    @abstractmethod
    def read(self) -> tuple[bytes, list[memoryview]]:
        """Return the header and writable buffers; other readers do not see writes to them."""


class RegionPayload(Payload):
    """Memory that a worker fills in place in each cell, and that the kernel reads after the cell.

    The first access to new pages costs several times more than copying, so a region is reused until a larger one is
    needed.
    """

    used_bytes: int
    """The bytes from the start that hold the results of this record."""
    is_reused = True
    """Whether later results may arrive in the same memory."""

    @property
    @abstractmethod
    def identity(self) -> Hashable:
        """A value that payloads over the same memory have in common."""

    @property
    @abstractmethod
    def memory(self) -> Any:
        """The writable buffer."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """The size of the memory."""

    @abstractmethod
    def share(self, used_bytes: int) -> RegionPayload:
        """Return another payload over the same memory, to be sent and closed on its own."""


Payloads = Mapping[str, Payload]
"""The payloads of one record, by name."""
NO_PAYLOADS: Payloads = MappingProxyType({})


class PayloadFactory(Protocol):
    """Allocates payloads in storage from which the engine can send them."""

    def write(self, header: bytes, buffers: Sequence[memoryview]) -> BufferPayload:
        """Return a payload of these bytes; each is copied at most once."""
        ...

    def reserve(self, num_bytes: int) -> RegionPayload:
        """Return a region of at least ``num_bytes`` bytes."""
        ...


class MemoryBuffers(BufferPayload):
    """A header and buffers in this process's memory; reading copies them."""

    def __init__(self, header: bytes, buffers: Sequence[memoryview]) -> None:
        self._header = header
        self._buffers = tuple(buffers)

    def read(self) -> tuple[bytes, list[memoryview]]:
        """Return the header and copies of the buffers."""
        return self._header, [memoryview(bytearray(buffer)) for buffer in self._buffers]

    def close(self) -> None:
        """Drop the buffers."""
        self._buffers = ()


class MemoryRegion(RegionPayload):
    """A region in this process's memory."""

    def __init__(self, memory: bytearray | memoryview, used_bytes: int | None = None) -> None:
        self._memory = memory
        self.used_bytes = len(memory) if used_bytes is None else used_bytes

    @property
    def identity(self) -> Hashable:
        """The identity of the memory."""
        return id(self._memory)

    @property
    def memory(self) -> bytearray | memoryview:
        """The bytes."""
        return self._memory

    @property
    def num_bytes(self) -> int:
        """The size of the memory."""
        return len(self._memory)

    def share(self, used_bytes: int) -> MemoryRegion:
        """Return another payload over the memory."""
        return MemoryRegion(self._memory, used_bytes)

    def close(self) -> None:
        """Do nothing: the memory is freed with its last reference."""


class MemoryPayloads:
    """A factory of payloads in this process's memory, for use there or for sending as a stream of bytes."""

    def write(self, header: bytes, buffers: Sequence[memoryview]) -> MemoryBuffers:
        """Return a payload that refers to the buffers."""
        return MemoryBuffers(header, buffers)

    def reserve(self, num_bytes: int) -> MemoryRegion:
        """Return a region of at least one byte."""
        return MemoryRegion(bytearray(max(num_bytes, 1)))


Kind = TypeVar("Kind", bound=Payload)


def find_payload(payloads: Payloads, name: str, kind: type[Kind]) -> Kind | None:
    """Return the payload of a name, None if there is none; raises ValueError if it is of another kind."""
    payload = payloads.get(name)
    if payload is not None and not isinstance(payload, kind):
        raise ValueError(f"the payload {name!r} is a {type(payload).__name__}, not a {kind.__name__}")
    return payload


def close_all(payloads: Iterable[Payload]) -> None:
    """Close each payload."""
    for payload in payloads:
        payload.close()
