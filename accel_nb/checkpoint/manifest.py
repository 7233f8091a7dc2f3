"""The manifest of a checkpoint: its files with sizes and checksums, and its tensors. Imports no torch.

Checksums are XXH3 (64 bits), one for each `CHUNK_BYTES` of a file, so that threads and ranks share the work; the
manifest itself has a BLAKE2b digest. They detect damage, not forgery: an attacker with write access can replace the
manifest too. Therefore all values are validated as well.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from xxhash import xxh3_64, xxh3_64_intdigest

from accel_nb.checkpoint.layout import (
    MANIFEST,
    Region,
    checked_file_name,
    covers_exactly,
    parse_json,
)
from accel_nb.errors import CorruptCheckpoint
from accel_nb.runtime.safetensors_header import DTYPES, checked_dtype, checked_shape

FORMAT = "accel_nb.checkpoint"
VERSION = 2
CHUNK_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file: its size in bytes and the checksum of each chunk."""

    size: int
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A part of a global tensor, stored under ``key`` in ``file``."""

    file: str
    key: str
    region: Region


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A global tensor and the pieces that tile it."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]

    @property
    def num_bytes(self) -> int:
        """Its size in memory."""
        return math.prod(self.shape) * DTYPES[self.dtype][1]


@dataclass(frozen=True)
class CheckpointOrigin:
    """Origin of a checkpoint.

    ``run`` is the same for all checkpoints of one training, resumed parts included; ``created`` is for display only,
    since clocks are not monotonic.
    """

    run: str
    step: int
    world_size: int
    strategy: str
    created: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint: metadata, files and tensors."""

    save_id: str
    origin: CheckpointOrigin
    state: str
    files: Mapping[str, FileRecord]
    tensors: Mapping[str, TensorRecord]

    @property
    def num_bytes(self) -> int:
        """The total size of the listed files."""
        return sum(record.size for record in self.files.values())

    def to_bytes(self) -> bytes:
        """Return the file's content."""
        origin = self.origin
        content: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "id": self.save_id,
            "run": origin.run,
            "step": origin.step,
            "world_size": origin.world_size,
            "strategy": origin.strategy,
            "created": origin.created,
            "versions": dict(origin.versions),
            "config": dict(origin.config),
            "chunk_bytes": CHUNK_BYTES,
            "state": self.state,
            "files": {
                name: {"size": record.size, "xxh3": [f"{value:016x}" for value in record.checksums]}
                for name, record in self.files.items()
            },
            "tensors": {
                path: {
                    "dtype": record.dtype,
                    "shape": list(record.shape),
                    "pieces": [
                        [piece.file, piece.key, list(piece.region.offsets), list(piece.region.shape)]
                        for piece in record.pieces
                    ],
                }
                for path, record in self.tensors.items()
            },
        }
        return json.dumps({**content, "digest": _digest(content)}, allow_nan=False).encode()


def read_manifest(text: bytes, where: str) -> Manifest:
    """Check a manifest and return it; ``where`` names the file in errors.

    Raises `CorruptCheckpoint` for anything that `Manifest.to_bytes` does not write.
    """
    content = parse_json(text, where)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CorruptCheckpoint(f"{where}: it is not a manifest of {FORMAT}")
    version = content.get("version")
    if version != VERSION:
        newer = isinstance(version, int) and version > VERSION
        remedy = "; it was written by a newer accel_nb: update to read it" if newer else ""
        raise CorruptCheckpoint(
            f"{where}: its version is {ascii(version)[:40]}, and this program reads {VERSION}{remedy}"
        )
    digest = content.pop("digest", None)
    if digest != _digest(content):
        raise CorruptCheckpoint(f"{where}: its digest does not match its content; it was damaged or edited")
    if content.get("chunk_bytes") != CHUNK_BYTES:
        raise CorruptCheckpoint(f"{where}: chunk_bytes is not {CHUNK_BYTES}")
    files = {name: _file(name, entry, where) for name, entry in _checked_object(content, "files", where).items()}
    state = _checked_text(content, "state", where)
    if state not in files:
        raise CorruptCheckpoint(f"{where}: it does not list its state file {state!a}")
    tensors = {
        path: _tensor(path, entry, files, where) for path, entry in _checked_object(content, "tensors", where).items()
    }
    origin = CheckpointOrigin(
        run=_checked_text(content, "run", where),
        step=_checked_int(content, "step", where),
        world_size=_checked_int(content, "world_size", where),
        strategy=_checked_text(content, "strategy", where),
        created=_checked_text(content, "created", where),
        config=_checked_object(content, "config", where),
        versions=_checked_object(content, "versions", where),
    )
    return Manifest(_checked_text(content, "id", where), origin, state, files, tensors)


def iter_chunks(size: int) -> Iterator[tuple[int, int]]:
    """Yield the ``[start, end)`` of each chunk of a file; an empty file has none."""
    for start in range(0, size, CHUNK_BYTES):
        yield start, min(start + CHUNK_BYTES, size)


def checksum(content: bytes | memoryview) -> int:
    """Return the checksum of a chunk."""
    return xxh3_64_intdigest(content)


def incremental_checksum() -> xxh3_64:
    """Return an incremental checksum."""
    return xxh3_64()


def make_file_record(content: bytes) -> FileRecord:
    """Return the record of a file's content."""
    view = memoryview(content)
    return FileRecord(len(content), tuple(checksum(view[start:end]) for start, end in iter_chunks(len(content))))


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def _file(name: str, entry: Any, where: str) -> FileRecord:
    checked_file_name(name, where)
    if name == MANIFEST or not isinstance(entry, dict) or set(entry) != {"size", "xxh3"}:
        raise CorruptCheckpoint(f"{where}: {name} is not described by size and xxh3")
    (size,) = checked_shape([entry["size"]], f"{where}: size of {name}")
    sums = entry["xxh3"]
    if not isinstance(sums, list) or len(sums) != -(-size // CHUNK_BYTES):
        raise CorruptCheckpoint(f"{where}: the checksums of {name} do not match its size of {size} bytes")
    try:
        return FileRecord(size, tuple(int(value, 16) for value in sums))
    except (TypeError, ValueError):
        raise CorruptCheckpoint(f"{where}: a checksum of {name} is not a hexadecimal number") from None


def _tensor(path: str, entry: Any, files: Mapping[str, FileRecord], where: str) -> TensorRecord:
    where = f"{where}: tensor {path[:200]!a}"
    if (
        not isinstance(entry, dict)
        or set(entry) != {"dtype", "shape", "pieces"}
        or not isinstance(entry["pieces"], list)
    ):
        raise CorruptCheckpoint(f"{where} is not described by dtype, shape and pieces")
    dtype, shape = checked_dtype(entry["dtype"], where), checked_shape(entry["shape"], where)
    pieces = tuple(_piece(piece, files, where) for piece in entry["pieces"])
    if any(not piece.region.is_inside(shape) for piece in pieces) or not covers_exactly(
        (p.region for p in pieces), shape
    ):
        raise CorruptCheckpoint(f"{where}: its pieces do not cover its shape {list(shape)} exactly once")
    return TensorRecord(dtype, shape, pieces)


def _piece(entry: Any, files: Mapping[str, FileRecord], where: str) -> StoredPiece:
    if not isinstance(entry, list) or len(entry) != 4 or not isinstance(entry[1], str):
        raise CorruptCheckpoint(f"{where}: a piece is not given by file, key, offsets and shape")
    if checked_file_name(entry[0], where) not in files:
        raise CorruptCheckpoint(f"{where}: its file {entry[0]} is not listed")
    return StoredPiece(entry[0], entry[1], Region(checked_shape(entry[2], where), checked_shape(entry[3], where)))


def _checked_object(content: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    value = content.get(name)
    if not isinstance(value, dict):
        raise CorruptCheckpoint(f"{where}: {name} is not an object")
    return value


def _checked_text(content: Mapping[str, Any], name: str, where: str) -> str:
    value = content.get(name)
    if not isinstance(value, str) or len(value) > 256 or not value.isprintable():
        raise CorruptCheckpoint(f"{where}: {name} is not a short text")
    return value


def _checked_int(content: Mapping[str, Any], name: str, where: str) -> int:
    (value,) = checked_shape([content.get(name)], f"{where}: {name}")
    return value
