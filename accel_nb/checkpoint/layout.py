"""The layout of a checkpoint in a store: names of files and folders, and regions of global tensors.

A checkpoint is a folder ``step_N`` with ``manifest.json``, ``state.json`` and safetensors files. Imports no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from accel_nb.errors import CheckpointError, CorruptCheckpoint
from accel_nb.runtime.strict_json import parse_strict_json

MANIFEST = "manifest.json"
LATEST = "latest"

MAX_JSON_BYTES = 1 << 30
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_STEP_NAME = re.compile(r"step_([0-9]{1,18})")
_TEMPORARY_NAME = re.compile(r"(.+)\.(tmp|old|gone)-([0-9a-f]{8,32})")


@dataclass(frozen=True, slots=True)
class Region:
    """A box in a global tensor: its offset and length in each dim."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def is_inside(self, shape: Sequence[int]) -> bool:
        """Return whether the box is inside of a tensor of ``shape``."""
        return len(self.offsets) == len(self.shape) == len(shape) and all(
            start >= 0 and length >= 0 and start + length <= total
            for start, length, total in zip(self.offsets, self.shape, shape, strict=True)
        )

    def overlaps(self, other: Region) -> bool:
        """Return whether the two have a common element."""
        return all(
            start < their_start + their_length and their_start < start + length
            for start, length, their_start, their_length in zip(
                self.offsets, self.shape, other.offsets, other.shape, strict=True
            )
        )


def full_region(shape: Sequence[int]) -> Region:
    """Return the region of a whole tensor."""
    return Region((0,) * len(shape), tuple(shape))


def covers_exactly(regions: Iterable[Region], shape: Sequence[int]) -> bool:
    """Return whether the regions cover a tensor of ``shape`` exactly once."""
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


def format_step_name(step: int) -> str:
    """Return the name of the checkpoint of a step."""
    return f"step_{step}"


def parse_step_name(name: str) -> int | None:
    """Return the step of an automatic name ``step_N``; None for other names."""
    match = _STEP_NAME.fullmatch(name)
    return int(match[1]) if match else None


def temporary_name(name: str, save_id: str) -> str:
    """Return the folder of a checkpoint that is being written."""
    return f"{name}.tmp-{save_id}"


def replaced_name(name: str, save_id: str) -> str:
    """Return the folder of a checkpoint that is being replaced by another one of the same name."""
    return f"{name}.old-{save_id}"


def removed_name(name: str, removal_id: str) -> str:
    """Return the folder of a checkpoint that is being removed."""
    return f"{name}.gone-{removal_id}"


def parse_temporary_name(folder: str) -> tuple[str, str] | None:
    """Return the checkpoint's name and ``tmp`` (being written), ``old`` (replaced) or ``gone`` (removed); else None."""
    match = _TEMPORARY_NAME.fullmatch(folder)
    return (match[1], match[2]) if match else None


def tensor_file(rank: int, world_size: int, number: int, suffix: str) -> str:
    """Return the name of one rank's file of tensors; ``suffix`` distinguishes saves in stores without rename."""
    return f"tensors-{rank:05}-of-{world_size:05}-{number:03}{suffix}.safetensors"


def state_file(suffix: str) -> str:
    """Return the name of the file with everything except tensors."""
    return f"state{suffix}.json"


def write_report_file(rank: int, suffix: str) -> str:
    """Return the name of the file by which a rank reports to rank 0 that its files are written."""
    return f"part-{rank:05}{suffix}.json"


def checked_file_name(name: object, where: str) -> str:
    """Return a file name read from a file if it is a plain one; raises `CorruptCheckpoint`."""
    if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
        shown = ascii(name) if len(ascii(name)) <= 80 else ascii(name)[:80] + "..."
        raise CorruptCheckpoint(
            f"{where}: the file name {shown} is not allowed; it takes letters, digits, '.', '_' and '-', and no folders"
        )
    return name


def checked_name(name: str) -> str:
    """Return a checkpoint's name given by the user; raises `CheckpointError` if it is not a plain folder name."""
    if not name or name in (".", "..") or set(name) & set("/\\\0") or parse_temporary_name(name):
        raise CheckpointError(f"{name!a} cannot be the name of a checkpoint; give a plain folder name")
    return name


def parse_json(text: bytes, where: str) -> Any:
    """Return the value of strict JSON; raises `CorruptCheckpoint`. ``where`` names the file in errors."""
    try:
        return parse_strict_json(text)
    except ValueError as error:
        raise CorruptCheckpoint(f"{where}: it is not strict JSON ({str(error)[:200]})") from None
