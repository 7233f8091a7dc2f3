"""Frames: messages with bulk data, between the kernel and the host process of a node.

On a stream a frame is its length, the length of its head, the head as JSON, and the parts whose sizes the head lists.
Nothing is unpickled here.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from accel_nb.pool.channel import ChannelError, Message
from accel_nb.pool.payload import BufferPayload, MemoryBuffers, MemoryRegion, Payload, Payloads, RegionPayload

HEARTBEAT_S = 0.5
"""Kernel and hosts send heartbeats this often."""
_LENGTHS = struct.Struct("!QI")

Part = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class GroupEpoch(Payload):
    """The number of the process group that ranks open next; hosts have a store for each number."""

    number: int

    def close(self) -> None:
        """Do nothing."""


class ReceivedRegion(MemoryRegion):
    """A region whose bytes have arrived for one record."""

    is_reused = False


@dataclass(frozen=True, slots=True)
class Frame:
    """A message and its bulk data: views of memory that may be in use. Send the frame before that memory changes."""

    message: Message
    parts: tuple[memoryview, ...] = ()

    @property
    def num_bytes(self) -> int:
        """The size of the bulk data."""
        return sum(part.nbytes for part in self.parts)

    def to_stream(self) -> list[Part]:
        """Return the bytes on a stream, in pieces."""
        head = json.dumps(
            {**self.message, "sizes": [part.nbytes for part in self.parts]}, separators=(",", ":")
        ).encode()
        return [_LENGTHS.pack(len(head) + self.num_bytes, len(head)), head, *self.parts]


def make_frame(message: Message, parts: Iterable[Part] = ()) -> Frame:
    """Return a frame with any buffers as its parts."""
    views = map(memoryview, parts)
    return Frame(message, tuple(view.cast("B") if view.nbytes else memoryview(b"") for view in views))


BEAT = Frame({"kind": "beat"})
"""A heartbeat."""


def join(frames: Iterable[Frame]) -> bytes:
    """Return a copy of frames as one piece of a stream."""
    return b"".join(piece for frame in frames for piece in frame.to_stream())


class FrameStream:
    """Reads frames from a stream that arrives in pieces; the parts of a frame are views of memory that only it uses."""

    def __init__(self) -> None:
        self._lengths = bytearray()
        self._body: memoryview | None = None
        self._head_size = self._filled = 0

    def feed(self, data: Part) -> list[Frame]:
        """Add data, and return the frames that are whole now."""
        view, frames = memoryview(data), list[Frame]()
        while view:
            if self._body is None:
                missing = _LENGTHS.size - len(self._lengths)
                self._lengths += view[:missing]
                view = view[missing:]
                if len(self._lengths) < _LENGTHS.size:
                    break
                size, self._head_size = _LENGTHS.unpack(self._lengths)
                if self._head_size > size:
                    raise ChannelError("the head of a frame is longer than the frame")
                self._lengths.clear()
                # Not a bytearray: to fill that with zeros takes as long as to receive the data, and no thread runs.
                self._body, self._filled = numpy.empty(size, numpy.uint8).data, 0
            count = min(len(self._body) - self._filled, len(view))
            self._body[self._filled : self._filled + count] = view[:count]
            self._filled += count
            view = view[count:]
            if self._filled == len(self._body):
                frames.append(_read_body(self._body, self._head_size))
                self._body = None
        return frames


def _read_body(body: memoryview, head_size: int) -> Frame:
    message = json.loads(bytes(body[:head_size]))
    parts: list[memoryview] = []
    offset = head_size
    for size in message.pop("sizes"):
        parts.append(body[offset : offset + size])
        offset += size
    if offset != len(body):
        raise ChannelError("the sizes of a frame's parts do not add up to its size")
    return Frame(message, tuple(parts))


def describe_payloads(payloads: Payloads) -> tuple[dict[str, Any], list[Part]]:
    """Return a table of payloads, and their bytes as parts of a frame."""
    tables: dict[str, Any] = {}
    parts: list[Part] = []
    for name, payload in payloads.items():
        if isinstance(payload, RegionPayload):
            tables[name] = {"kind": "region", "parts": 1}
            parts.append(memoryview(payload.memory)[: payload.used_bytes])
        elif isinstance(payload, BufferPayload):
            header, buffers = payload.read()
            tables[name] = {"kind": "buffers", "parts": 1 + len(buffers)}
            parts += [header, *buffers]
        else:
            raise TypeError(f"the payload {name!r} is a {type(payload).__name__}, which cannot be sent to a node")
    return tables, parts


def build_payloads(tables: dict[str, Any], parts: Sequence[memoryview]) -> dict[str, Payload]:
    """Return the payloads of a table; their bytes are the first of ``parts``, in its order."""
    payloads: dict[str, Payload] = {}
    start = 0
    for name, table in tables.items():
        own = parts[start : start + table["parts"]]
        start += table["parts"]
        if table["kind"] == "region":
            payloads[name] = ReceivedRegion(own[0])
        else:
            payloads[name] = MemoryBuffers(bytes(own[0]), own[1:])
    return payloads
