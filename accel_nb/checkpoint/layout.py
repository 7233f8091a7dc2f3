"""What a checkpoint looks like on a store: names, the parts of global tensors, and the header of a tensor file.

A checkpoint is a folder ``step_N`` with ``manifest.json``, ``state.json`` and safetensors files. Plain data, no torch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from accel_nb.errors import CheckpointError, CorruptCheckpoint

MANIFEST = "manifest.json"
LATEST = "latest"

MAX_JSON_BYTES = 1 << 30
MAX_HEADER_BYTES = 100_000_000  # the limit that safetensors itself has
MAX_DIMS = 64

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

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_STEP_NAME = re.compile(r"step_([0-9]{1,18})")
_ASIDE = re.compile(r"(.+)\.(tmp|old|gone)-([0-9a-f]{8,32})")


@dataclass(frozen=True, slots=True)
class Region:
    """A box in a global tensor: where it begins in each dim, and how long it is there."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many elements it holds."""
        return math.prod(self.shape)

    def is_inside(self, shape: Sequence[int]) -> bool:
        """Whether the box lies within a tensor of ``shape``."""
        return len(self.offsets) == len(self.shape) == len(shape) and all(
            start >= 0 and length >= 0 and start + length <= total
            for start, length, total in zip(self.offsets, self.shape, shape, strict=True)
        )

    def overlaps(self, other: Region) -> bool:
        """Whether the two share an element."""
        return all(
            start < their_start + their_length and their_start < start + length
            for start, length, their_start, their_length in zip(
                self.offsets, self.shape, other.offsets, other.shape, strict=True
            )
        )


def whole(shape: Sequence[int]) -> Region:
    """Return the region that is all of a tensor."""
    return Region((0,) * len(shape), tuple(shape))


def tiles(regions: Iterable[Region], shape: Sequence[int]) -> bool:
    """Whether the regions cover a tensor of ``shape`` exactly once."""
    filled = sorted((region for region in regions if region.size), key=lambda region: region.offsets)
    if sum(region.size for region in filled) != math.prod(shape):
        return False
    active: list[Region] = []
    for region in filled:
        if not region.is_inside(shape):
            return False
        if shape:
            active = [other for other in active if other.offsets[0] + other.shape[0] > region.offsets[0]]
        if any(region.overlaps(other) for other in active):
            return False
        active.append(region)
    return True


def step_name(step: int) -> str:
    """Return the name of the checkpoint of a step."""
    return f"step_{step}"


def step_of(name: str) -> int | None:
    """Return the step that an automatic name stands for; None for other names."""
    match = _STEP_NAME.fullmatch(name)
    return int(match[1]) if match else None


def temporary_name(name: str, save_id: str) -> str:
    """Return where a checkpoint is written before it is complete."""
    return f"{name}.tmp-{save_id}"


def replaced_name(name: str, save_id: str) -> str:
    """Return where a checkpoint waits that another one of the same name replaces."""
    return f"{name}.old-{save_id}"


def removed_name(name: str, removal_id: str) -> str:
    """Return what a checkpoint is called while it is removed."""
    return f"{name}.gone-{removal_id}"


def aside(folder: str) -> tuple[str, str] | None:
    """Return the checkpoint's name and ``tmp``, ``old`` or ``gone``; None for a folder that is not set aside."""
    match = _ASIDE.fullmatch(folder)
    return (match[1], match[2]) if match else None


def tensor_file(rank: int, world_size: int, number: int, suffix: str) -> str:
    """Return the name of one rank's file of tensors; ``suffix`` keeps saves apart where folders cannot be renamed."""
    return f"tensors-{rank:05}-of-{world_size:05}-{number:03}{suffix}.safetensors"


def state_file(suffix: str) -> str:
    """Return the name of the file that holds everything but tensors."""
    return f"state{suffix}.json"


def part_file(rank: int, suffix: str) -> str:
    """Return the name of the note by which a rank says that its files are written."""
    return f"part-{rank:05}{suffix}.json"


def checked_file_name(name: object, where: str) -> str:
    """Return a file name that came out of a file if it is a plain one; raises `CorruptCheckpoint`."""
    if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
        shown = ascii(name) if len(ascii(name)) <= 80 else ascii(name)[:80] + "..."
        raise CorruptCheckpoint(
            f"{where}: the file name {shown} is not allowed; it takes letters, digits, '.', '_' and '-', and no folders"
        )
    return name


def checked_name(name: str) -> str:
    """Return a checkpoint's name that a user gave; raises `CheckpointError` for one that no folder may have."""
    if not name or name in (".", "..") or set(name) & set("/\\\0") or aside(name):
        raise CheckpointError(f"{name!a} cannot be the name of a checkpoint; give a plain folder name")
    return name


def header_of(tensors: Mapping[str, tuple[str, Sequence[int], int]]) -> bytes:
    """Return a safetensors header, its length in front, for tensors that follow each other.

    ``tensors`` maps each key to dtype, shape and size in bytes, in the order of the data.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for key, (dtype, shape, num_bytes) in tensors.items():
        entries[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, start + num_bytes]}
        start += num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where one tensor lies in a file: its bytes are ``[start, end)``."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(content: memoryview, where: str) -> dict[str, TensorPlace]:
    """Return the tensors of a safetensors file by key; ``where`` names the file in errors.

    Raises `CorruptCheckpoint` for lengths beyond the file, unknown dtypes, shapes that do not fit their bytes, and
    tensors that overlap or leave holes.
    """
    if len(content) < 8:
        raise CorruptCheckpoint(f"{where}: {len(content)} bytes are too few for a safetensors file")
    length = int.from_bytes(content[:8], "little")
    if length > MAX_HEADER_BYTES or 8 + length > len(content):
        raise CorruptCheckpoint(
            f"{where}: its header claims {length} bytes, of {len(content)} in the file; allowed are {MAX_HEADER_BYTES}"
        )
    entries = parse_json(bytes(content[8 : 8 + length]), where)
    if not isinstance(entries, dict):
        raise CorruptCheckpoint(f"{where}: its header is no object")
    entries.pop("__metadata__", None)
    places = {key: _place(entry, 8 + length, f"{where}: tensor {key[:200]!a}") for key, entry in entries.items()}
    end = 8 + length
    for key, place in sorted(places.items(), key=lambda item: (item[1].start, item[1].end)):
        if place.start != end:
            raise CorruptCheckpoint(f"{where}: tensor {key[:200]!a} overlaps another or leaves a hole before it")
        end = place.end
    if end != len(content):
        raise CorruptCheckpoint(f"{where}: the tensors end at byte {end} and the file at {len(content)}")
    return places


def _place(entry: Any, base: int, where: str) -> TensorPlace:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CorruptCheckpoint(f"{where} is not described by dtype, shape and data_offsets")
    dtype, shape = checked_dtype(entry["dtype"], where), checked_shape(entry["shape"], where)
    ends = checked_shape(entry["data_offsets"], where)
    if len(ends) != 2 or ends[1] - ends[0] != math.prod(shape) * DTYPES[dtype][1]:
        raise CorruptCheckpoint(f"{where}: its bytes {list(ends)} do not fit its shape {list(shape)} of {dtype}")
    return TensorPlace(dtype, shape, base + ends[0], base + ends[1])


def checked_dtype(value: Any, where: str) -> str:
    """Return a dtype's name if it is one of `DTYPES`; raises `CorruptCheckpoint`."""
    if not isinstance(value, str) or value not in DTYPES:
        raise CorruptCheckpoint(f"{where}: dtype {ascii(value)[:40]} is unknown; known: {', '.join(DTYPES)}")
    return value


def checked_shape(value: Any, where: str) -> tuple[int, ...]:
    """Return a list of whole numbers from 0 as a tuple; raises `CorruptCheckpoint`."""
    if (
        not isinstance(value, list)
        or len(value) > MAX_DIMS
        or any(type(number) is not int or not 0 <= number < 1 << 63 for number in value)
    ):
        raise CorruptCheckpoint(f"{where}: {ascii(value)[:80]} is no list of sizes")
    return tuple(value)


def parse_json(text: bytes, where: str) -> Any:
    """Parse strict JSON: no NaN, no infinities, no key twice; raises `CorruptCheckpoint`."""
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # a UnicodeDecodeError is a ValueError
        raise CorruptCheckpoint(f"{where}: it is no strict JSON ({str(error)[:200]})") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")
