"""Reading of checkpoints.

All ranks verify a checkpoint together. Then each reads any region of any tensor, whatever the number of ranks that
saved it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from accel_nb.checkpoint.discovery import find_checkpoints, load_manifest
from accel_nb.checkpoint.encoding import StoredArray, decode
from accel_nb.checkpoint.layout import MAX_JSON_BYTES, Region, full_region
from accel_nb.checkpoint.manifest import Manifest, TensorRecord
from accel_nb.checkpoint.store import Store
from accel_nb.checkpoint.verify import map_files, verify_files
from accel_nb.errors import AccelNbError, CorruptCheckpoint
from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.runtime.safetensors_header import DTYPES, TensorEntry, read_header
from accel_nb.runtime.tensors.state_tree import map_state


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor of a checkpoint that is not read yet; ``shape`` is the global shape."""

    path: str
    """Its path in the state tree."""
    record: TensorRecord
    source: StoredCheckpoint

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return self.record.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the saved tensor."""
        return getattr(torch, DTYPES[self.record.dtype][0])

    def read(self, region: Region | None = None) -> Tensor:
        """Return the tensor, or a part of it, on the CPU.

        It may be a view of a copy-on-write memory map, so changes do not reach the file.
        """
        return self.source.read(self.record, region or full_region(self.shape))


@dataclass
class StoredCheckpoint:
    """A checkpoint open for reading, with files verified by `open_checkpoint`."""

    url: str
    manifest: Manifest
    files: Mapping[str, memoryview]
    skipped: list[str] = field(default_factory=list)
    """Problems of newer checkpoints that were skipped, one line each."""

    _headers: dict[str, dict[str, TensorEntry]] = field(default_factory=dict)

    def read_tree(self) -> Any:
        """Return the state tree, with a `StoredTensor` in place of each tensor.

        Raises `CorruptCheckpoint` if the state refers to tensors that are not there, or files and manifest disagree.
        """
        for path, record in self.manifest.tensors.items():
            self._check(path, record)
        known: dict[str, StoredTensor] = {}

        def tensor(path: str) -> StoredTensor:
            if path not in known:
                known[path] = StoredTensor(path, self.manifest.tensors[path], self)
            return known[path]

        name = self.manifest.state
        return decode(bytes(self.files[name][:MAX_JSON_BYTES]), tensor, f"{self.url}/{name}")

    def read(self, record: TensorRecord, region: Region) -> Tensor:
        """Return a region of a stored tensor."""
        for piece in record.pieces:
            if piece.region == region:
                return self._piece(piece.file, piece.key)
        dtype = getattr(torch, DTYPES[record.dtype][0])
        result = torch.empty(region.shape, dtype=dtype, device="cpu")
        for index, source, target in _overlaps(record, region):
            piece = record.pieces[index]
            result[target].copy_(self._piece(piece.file, piece.key)[source])
        return result

    def _piece(self, file: str, key: str) -> Tensor:
        entry = self._header(file)[key]
        dtype = getattr(torch, DTYPES[entry.dtype][0])
        if entry.start == entry.end:
            return torch.empty(entry.shape, dtype=dtype, device="cpu")
        content = self.files[file][entry.start : entry.end]
        if entry.start % DTYPES[entry.dtype][1]:
            content = memoryview(bytearray(content))
        return torch.frombuffer(content, dtype=dtype).view(entry.shape)

    def _header(self, file: str) -> dict[str, TensorEntry]:
        if file not in self._headers:
            self._headers[file] = read_header(self.files[file], f"{self.url}/{file}")
        return self._headers[file]

    def _check(self, path: str, record: TensorRecord) -> None:
        for piece in record.pieces:
            entry = self._header(piece.file).get(piece.key)
            if entry is None or entry.dtype != record.dtype or entry.shape != piece.region.shape:
                raise CorruptCheckpoint(
                    f"{self.url}/{piece.file}: it has no {record.dtype} of shape {list(piece.region.shape)} under "
                    f"the key {piece.key[:200]!a}, which the manifest lists for {path[:200]!a}"
                )


def open_checkpoint(url: str | os.PathLike[str], comm: Communicator) -> StoredCheckpoint:
    """Open the newest valid checkpoint at ``url``; every rank must call, and all open the same one.

    Sizes and checksums are compared first, divided among the ranks. In a folder of checkpoints damaged ones are
    skipped; for the URL of a single one there is no alternative. If rank 0 finds none, it raises the error of its
    search, such as `NoCheckpoint`, and the others `CorruptCheckpoint` with its text. If none is valid, all raise that.
    """
    found, problem = None, None
    try:
        found = find_checkpoints(url)
    except (AccelNbError, OSError) as error:
        problem = error
    sent = comm.broadcast_json({"names": found[1] if found else None, "problem": str(problem)})
    if sent["names"] is None:
        raise problem or CorruptCheckpoint(f"rank 0: {sent['problem']}")
    skipped: list[str] = []
    for name in sent["names"]:
        opened: StoredCheckpoint | None = None
        reason = "rank 0 finds a checkpoint here, but this rank does not: the folder must be shared by all ranks"
        if found is not None:
            try:
                opened, reason = _open(found[0], name, comm), None
            except AccelNbError as error:
                reason = str(error)
            except OSError as error:  # such as of the storage, on this node only: the other ranks wait for the reason
                reason = f"{found[0].url}/{name}: {error}"
        reasons = comm.all_gather_json([reason, opened.manifest.save_id if opened else None])
        first = next(
            (f"{text} (rank {rank})" if rank else text for rank, (text, _) in enumerate(reasons) if text), None
        )
        if first is None and len({save_id for _, save_id in reasons}) > 1:
            first = f"{name}: ranks read different checkpoints"
        if first is None and opened is not None:
            opened.skipped.extend(skipped)
            return opened
        skipped.append(str(first))
    raise CorruptCheckpoint("\n".join(skipped))


def materialize(tree: Any) -> Any:
    """Return a tree with every stored tensor read whole; references to one tensor remain references to one."""
    read: dict[int, Tensor] = {}

    def read_leaf(leaf: Any) -> Any:
        if isinstance(leaf, StoredTensor):
            if id(leaf) not in read:
                read[id(leaf)] = leaf.read()
            return read[id(leaf)]
        if isinstance(leaf, StoredArray):
            return read_leaf(leaf.tensor).numpy().copy()
        return leaf

    return map_state(read_leaf, tree)


def _open(store: Store, name: str, comm: Communicator) -> StoredCheckpoint:
    manifest = load_manifest(store, name)
    url = f"{store.url}/{name}"
    files = map_files(store, name, manifest)
    verify_files(files, manifest, url, share=(comm.world.rank, comm.world.size))
    return StoredCheckpoint(url, manifest, files)


def _overlaps(record: TensorRecord, region: Region) -> list[tuple[int, tuple[slice, ...], tuple[slice, ...]]]:
    """Return the copies to make: index of the piece, slices in the piece, slices in the region.

    Uses the planner of PyTorch's distributed checkpoint, not its storage layer.
    """
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    def chunk(part: Region) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.shape))

    stored = TensorStorageMetadata(
        TensorProperties(), torch.Size(record.shape), [chunk(piece.region) for piece in record.pieces]
    )
    items = create_read_items_for_chunk_list("", stored, [chunk(region)])
    return [
        (
            item.storage_index.index or 0,
            _box(item.storage_offsets, item.lengths),
            _box(item.dest_offsets, item.lengths),
        )
        for item in items
    ]


def _box(offsets: torch.Size, lengths: torch.Size) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in zip(offsets, lengths, strict=True))
