"""The header of safetensors files: dtypes, checked reading, writing; imports no torch.

A file consists of the header's length (8 bytes, little endian), the header (JSON: dtype, shape and byte range of each
tensor), and the tensors' bytes. See https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from accel_nb.errors import CorruptCheckpoint
from accel_nb.runtime.strict_json import parse_strict_json

SUFFIX = ".safetensors"
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_MAX_DIMS = 64
_MAX_SIZE = 1 << 62
_LENGTH_BYTES = 8

DTYPES: Mapping[str, tuple[str, int]] = MappingProxyType(
    {
        "BOOL": ("bool", 1),
        "U8": ("uint8", 1),
        "I8": ("int8", 1),
        "F8_E4M3": ("float8_e4m3fn", 1),
        "F8_E5M2": ("float8_e5m2", 1),
        "U16": ("uint16", 2),
        "I16": ("int16", 2),
        "F16": ("float16", 2),
        "BF16": ("bfloat16", 2),
        "U32": ("uint32", 4),
        "I32": ("int32", 4),
        "F32": ("float32", 4),
        "U64": ("uint64", 8),
        "I64": ("int64", 8),
        "F64": ("float64", 8),
        "C64": ("complex64", 8),
    }
)
"""The dtypes of safetensors, each with torch's name and its size in bytes."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor in a file: its bytes are ``[start, end)``, counted from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def encode_header(tensors: Mapping[str, tuple[str, Sequence[int], int]]) -> bytes:
    """Return a header with its length in front, for tensors stored one after the other.

    ``tensors`` maps each name to dtype, shape and size in bytes, in the order of the data.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, (dtype, shape, num_bytes) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, start + num_bytes]}
        start += num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def read_header(content: memoryview, where: str) -> dict[str, TensorEntry]:
    """Return the tensors of a safetensors file that is in memory, by name; ``where`` names the file in errors.

    Raises `CorruptCheckpoint` for a header longer than the file, entries with other fields than dtype, shape and
    data_offsets, unknown dtypes, shapes that do not match their bytes, overlaps, gaps and trailing bytes.
    """
    return _read(lambda start, end: bytes(content[start:end]), len(content), where)


def read_file_header(fd: int, where: str) -> dict[str, TensorEntry]:
    """Return the tensors of an open safetensors file as `read_header` does; only the header is read.

    Raises `OSError` too, if the file cannot be read.
    """
    return _read(lambda start, end: _read_bytes(fd, start, end, where), os.fstat(fd).st_size, where)


def checked_dtype(value: Any, where: str) -> str:
    """Return a dtype's name if it is one of `DTYPES`; raise `CorruptCheckpoint` for others."""
    if not isinstance(value, str) or value not in DTYPES:
        raise CorruptCheckpoint(f"{where}: dtype {ascii(value)[:40]} is unknown; known: {', '.join(DTYPES)}")
    return value


def checked_shape(value: Any, where: str) -> tuple[int, ...]:
    """Return a list of nonnegative integers as a tuple; raise `CorruptCheckpoint` for other values."""
    if (
        not isinstance(value, list)
        or len(value) > _MAX_DIMS
        or any(type(number) is not int or not 0 <= number < _MAX_SIZE for number in value)
    ):
        raise CorruptCheckpoint(f"{where}: {ascii(value)[:80]} is not a list of sizes (integers from 0)")
    return tuple(value)


def _read(read: Callable[[int, int], bytes], num_bytes: int, where: str) -> dict[str, TensorEntry]:
    if num_bytes < _LENGTH_BYTES:
        raise CorruptCheckpoint(f"{where}: {num_bytes} bytes are too few for a safetensors file")
    length = int.from_bytes(read(0, _LENGTH_BYTES), "little")
    start = _LENGTH_BYTES + length
    if length > MAX_HEADER_BYTES or start > num_bytes:
        raise CorruptCheckpoint(
            f"{where}: its header length is {length} bytes, but the file has {num_bytes}, and at most "
            f"{MAX_HEADER_BYTES} are allowed"
        )
    try:
        header = parse_strict_json(read(_LENGTH_BYTES, start))
    except ValueError as error:
        raise CorruptCheckpoint(f"{where}: its header is not strict JSON ({str(error)[:200]})") from None
    if not isinstance(header, dict):
        raise CorruptCheckpoint(f"{where}: its header is not a JSON object")
    header.pop("__metadata__", None)
    entries = {name: _entry(entry, start, f"{where}: tensor {_printable(name)}") for name, entry in header.items()}
    end = start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != end:
            raise CorruptCheckpoint(f"{where}: tensor {_printable(name)} overlaps another or leaves a hole before it")
        end = entry.end
    if end != num_bytes:
        raise CorruptCheckpoint(
            f"{where}: the tensors end at byte {end} and the file at {num_bytes}: it is truncated or too long"
        )
    return entries


def _entry(entry: Any, base: int, where: str) -> TensorEntry:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CorruptCheckpoint(f"{where} is not described by dtype, shape and data_offsets")
    dtype, shape = checked_dtype(entry["dtype"], where), checked_shape(entry["shape"], where)
    ends = checked_shape(entry["data_offsets"], where)
    if len(ends) != 2 or ends[1] - ends[0] != math.prod(shape) * DTYPES[dtype][1]:
        raise CorruptCheckpoint(
            f"{where}: its data_offsets {list(ends)} do not match its shape {list(shape)} of {dtype}"
        )
    return TensorEntry(dtype, shape, base + ends[0], base + ends[1])


def _read_bytes(fd: int, start: int, end: int, where: str) -> bytes:
    content = bytearray()
    while len(content) < end - start:
        part = os.pread(fd, end - start - len(content), start + len(content))
        if not part:
            raise CorruptCheckpoint(f"{where}: it was truncated while it was read")
        content += part
    return bytes(content)


def _printable(name: str) -> str:
    return ascii(name[:200])
