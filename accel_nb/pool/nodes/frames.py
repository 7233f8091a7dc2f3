"""Frames: messages with bulk data as bytes, between the kernel and the host process of a node.

A frame is its length, the length of its head, the head as JSON, and the parts whose sizes the head lists. Nothing is
unpickled here.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from accel_nb.pool.channel import ChannelError, Message
from accel_nb.pool.payload import BufferPayload, MemoryBuffers, MemoryRegion, Payload, Payloads, RegionPayload

_LENGTHS = struct.Struct("!QI")

HEARTBEAT_S = 0.5
"""Kernel and hosts send signs of life this often."""

Part = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class GroupEpoch(Payload):
    """The number of the process group that ranks open next; hosts have a store for each number."""

    number: int

    def close(self) -> None:
        """Do nothing."""


def pack_frame(message: Message, parts: Sequence[Part] = ()) -> bytes:
    """Return a frame as bytes."""
    views = [memoryview(part).cast("B") if memoryview(part).nbytes else memoryview(b"") for part in parts]
    head = json.dumps({**message, "sizes": [view.nbytes for view in views]}, separators=(",", ":")).encode()
    size = len(head) + sum(view.nbytes for view in views)
    return b"".join((_LENGTHS.pack(size, len(head)), head, *views))


def read_frames(data: Part) -> Iterator[tuple[Message, list[memoryview]]]:
    """Yield each message in ``data``, which holds whole frames, with views of its parts."""
    view, start = memoryview(data), 0
    while start < len(view):
        size, head_size = _LENGTHS.unpack_from(view, start)
        start += _LENGTHS.size
        if head_size > size or start + size > len(view):
            raise ChannelError("a frame was cut short")
        message = json.loads(bytes(view[start : start + head_size]))
        parts, offset = [], start + head_size
        for part_size in message.pop("sizes"):
            parts.append(view[offset : offset + part_size])
            offset += part_size
        yield message, parts
        start += size


BEAT = pack_frame({"kind": "beat"})
"""A sign of life."""


class FrameStream:
    """Whole frames from a stream that arrives in pieces."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> bytes:
        """Add data, and return the frames that are whole now."""
        self._rest += data
        end = 0
        while end + _LENGTHS.size <= len(self._rest):
            size, _ = _LENGTHS.unpack_from(self._rest, end)
            if end + _LENGTHS.size + size > len(self._rest):
                break
            end += _LENGTHS.size + size
        whole = bytes(memoryview(self._rest)[:end])
        del self._rest[:end]
        return whole


def describe_payloads(payloads: Payloads) -> tuple[dict[str, Any], list[Part]]:
    """Return a table of payloads, and their bytes as parts of a frame."""
    tables: dict[str, Any] = {}
    parts: list[Part] = []
    for name, payload in payloads.items():
        if isinstance(payload, RegionPayload):
            tables[name] = {"kind": "region", "parts": 1}
            parts.append(memoryview(payload.memory))
        elif isinstance(payload, BufferPayload):
            header, buffers = payload.read()
            tables[name] = {"kind": "buffers", "parts": 1 + len(buffers)}
            parts += [header, *buffers]
        else:
            raise TypeError(f"the payload {name!r} is a {type(payload).__name__}, which cannot be sent to a node")
    return tables, parts


def build_payloads(tables: dict[str, Any], parts: Sequence[memoryview]) -> dict[str, Payload]:
    """Return the payloads of a table, whose bytes start with ``parts``."""
    payloads: dict[str, Payload] = {}
    start = 0
    for name, table in tables.items():
        own = parts[start : start + table["parts"]]
        start += table["parts"]
        if table["kind"] == "region":
            payloads[name] = MemoryRegion(bytearray(own[0]))
        else:
            payloads[name] = MemoryBuffers(bytes(own[0]), own[1:])
    return payloads
