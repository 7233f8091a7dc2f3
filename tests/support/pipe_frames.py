"""Records and payloads as bytes on a stream: the transport of `PipeEngine`."""

from __future__ import annotations

import json
import struct
from typing import IO, Any

from accel_nb.pool.messages import decode, encode
from accel_nb.pool.payload import NO_PAYLOADS, MemoryBuffers, MemoryRegion, Payload, Payloads, RegionPayload


def write_frame(stream: IO[bytes], message: dict[str, Any], payloads: Payloads = NO_PAYLOADS) -> None:
    """Write one message, then the bytes of its payloads."""
    tables, chunks = {}, []
    for name, payload in payloads.items():
        if isinstance(payload, RegionPayload):
            parts = [bytes(payload.memory[: payload.used_bytes])]
        else:
            header, buffers = payload.read()  # type: ignore[attr-defined]
            parts = [header, *map(bytes, buffers)]
        tables[name] = {"is_region": isinstance(payload, RegionPayload), "sizes": list(map(len, parts))}
        chunks += parts
    head = json.dumps({"message": message, "payloads": tables}).encode()
    stream.write(struct.pack("!I", len(head)) + head + b"".join(chunks))
    stream.flush()


def read_frame(stream: IO[bytes]) -> tuple[dict[str, Any], dict[str, Payload]]:
    """Read one message with its payloads; raises EOFError at the end of the stream."""
    head = json.loads(_read(stream, struct.unpack("!I", _read(stream, 4))[0]))
    payloads: dict[str, Payload] = {}
    for name, table in head["payloads"].items():
        parts = [_read(stream, size) for size in table["sizes"]]
        if table["is_region"]:
            payloads[name] = MemoryRegion(bytearray(parts[0]))
        else:
            payloads[name] = MemoryBuffers(parts[0], list(map(memoryview, parts[1:])))
    return head["message"], payloads


def write_record(stream: IO[bytes], record: object, payloads: Payloads = NO_PAYLOADS) -> None:
    write_frame(stream, encode(record), payloads)


def read_record(stream: IO[bytes]) -> tuple[Any, dict[str, Payload]]:
    message, payloads = read_frame(stream)
    return decode(message), payloads


def _read(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data
