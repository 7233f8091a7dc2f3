"""Reader of folders written by ``torch.distributed.checkpoint`` (DCP), as FSDP's sharded state dicts are.

A folder has the pickle ``.metadata``, which places each tensor's chunks in the files ``*.distcp``. The pickle is read
without torch's unpickler: only the names of DCP's own records are allowed, and each becomes a `_Record` of plain
values, so no code of the file or of torch runs. Chunks are read by torch's ``weights_only`` unpickler.
"""

from __future__ import annotations

import io
import os
import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accel_nb.checkpoint.accelerate_format import (
    check_plain_file,
    check_torch_reads_pickles,
    summarize_unpickling_error,
)
from accel_nb.checkpoint.layout import Region, covers_exactly
from accel_nb.errors import CheckpointError, CorruptCheckpoint, NoCheckpoint

METADATA = ".metadata"

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_MODEL_KEY = "model"
_MODEL_FOLDER = "pytorch_model_fsdp_0"


class _Record:
    """An object of the pickle, with its attributes as plain values."""

    state: Any = None

    def __init__(self, *values: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        """Return an attribute, None if it is not set."""
        return self.state.get(name) if isinstance(self.state, dict) else None


class _TensorEntry(_Record):
    """Dtype, shape and chunks of a tensor."""


class _BytesEntry(_Record):
    """A value that is not a tensor."""


def _ignore(*values: Any) -> None:
    """Replace a function of the pickle whose result is not needed: a layout, a path, or a member of an enum."""


_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_ALLOWED: Mapping[tuple[str, str], Any] = MappingProxyType(
    {
        (_METADATA_MODULE, "Metadata"): _Record,
        (_METADATA_MODULE, "TensorStorageMetadata"): _TensorEntry,
        (_METADATA_MODULE, "BytesStorageMetadata"): _BytesEntry,
        (_METADATA_MODULE, "ChunkStorageMetadata"): _Record,
        (_METADATA_MODULE, "TensorProperties"): _Record,
        (_METADATA_MODULE, "MetadataIndex"): _Record,
        (_METADATA_MODULE, "StorageMeta"): _Record,
        (_METADATA_MODULE, "_MEM_FORMAT_ENCODING"): _Record,
        ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"): _Record,
        ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"): _Record,
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Record,
        ("torch", "Size"): tuple,
        ("torch.serialization", "_get_layout"): _ignore,
        ("pathlib", "PosixPath"): _ignore,
        ("pathlib", "WindowsPath"): _ignore,
        ("pathlib._local", "PosixPath"): _ignore,
        ("pathlib._local", "WindowsPath"): _ignore,
        ("builtins", "getattr"): _ignore,  # some versions of Python pickle a member of an enum by its name
    }
)


class _MetadataUnpickler(pickle.Unpickler):
    """Builds records of the allowed names, and raises UnpicklingError, which has the name, for any other."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"{module}.{name} is not a record of torch.distributed.checkpoint")


class _Chunk(NamedTuple):
    region: Region
    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class _StoredTensor:
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[_Chunk, ...]


@dataclass(frozen=True)
class DcpWeights:
    """The weights of one model in a folder; `tensors` reads them one at a time."""

    folder: Path
    left_out: tuple[str, ...]
    """Entries that are not weights of the model: values that are not tensors, and other objects than the model."""

    _stored: Mapping[str, _StoredTensor]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each name and its whole tensor, on the CPU; raises `CorruptCheckpoint`, which names the file."""
        for name, stored in self._stored.items():
            whole = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
            for chunk in stored.chunks:
                place = tuple(
                    slice(start, start + size)
                    for start, size in zip(chunk.region.offsets, chunk.region.shape, strict=True)
                )
                whole[place] = self._read(name, chunk, stored.dtype)
            yield name, whole

    def _read(self, name: str, chunk: _Chunk, dtype: torch.dtype) -> Tensor:
        path = check_plain_file(self.folder / chunk.file)
        with open(path, "rb") as source:
            source.seek(chunk.offset)
            content = source.read(chunk.length)
        try:
            found = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged file may raise anything
            raise CorruptCheckpoint(
                f"{path}: the chunk of {name!a} at byte {chunk.offset} is not a tensor, or is damaged "
                f"({summarize_unpickling_error(error)})"
            ) from None
        if not isinstance(found, Tensor) or (tuple(found.shape), found.dtype) != (chunk.region.shape, dtype):
            raise CorruptCheckpoint(f"{path}: the chunk of {name!a} at byte {chunk.offset} is not what {METADATA} says")
        return found


def is_dcp_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether a folder has the metadata of ``torch.distributed.checkpoint``."""
    return (Path(path) / METADATA).is_file()


def open_dcp_weights(path: str | os.PathLike[str]) -> DcpWeights:
    """Open the weights of a model in a folder of ``torch.distributed.checkpoint``; their values are read later.

    They are the folder's tensors, without the key that all of them have in common, as in ``{"model": state_dict}``. Of
    several keys ``model`` is read. Raises `NoCheckpoint` if there is no such folder, `CheckpointError` if it holds no
    model's weights, and `CorruptCheckpoint` for a file that is damaged or not a record of DCP.
    """
    folder = Path(path)
    if not is_dcp_folder(folder):
        inner = folder / _MODEL_FOLDER
        hint = f"; give {inner}, which has one" if is_dcp_folder(inner) else ""
        raise NoCheckpoint(f"{folder}: there is no file {METADATA} of torch.distributed.checkpoint{hint}")
    check_torch_reads_pickles(folder)
    metadata = _read_metadata(folder / METADATA)
    try:
        entries: dict[str, Any] = metadata.get("state_dict_metadata")
        paths = _object_paths(entries, metadata.get("planner_data"))
        places = _chunk_places(metadata.get("storage_data"))
        names = _weight_names(folder, entries, paths)
        stored = {name: _stored_tensor(folder, key, entries[key], places) for key, name in names.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CorruptCheckpoint(
            f"{folder / METADATA}: it does not place the tensors ({type(error).__name__}: {str(error)[:200]})"
        ) from None
    return DcpWeights(folder, tuple(key for key in entries if key not in names), stored)


def remove_dcp_files(path: str | os.PathLike[str]) -> None:
    """Remove the files of ``torch.distributed.checkpoint`` from a folder, and the folder if it is then empty."""
    folder = Path(path)
    for file in [folder / METADATA, *folder.glob("*.distcp")]:
        file.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()


def _read_metadata(file: Path) -> _Record:
    check_plain_file(file)
    try:
        with open(file, "rb") as source:
            found = _MetadataUnpickler(source).load()
    except Exception as error:  # a damaged pickle may raise anything
        raise CorruptCheckpoint(
            f"{file}: it holds more than torch.distributed.checkpoint writes, or is damaged, and is not read "
            f"({type(error).__name__}: {str(error)[:300]})"
        ) from None
    if not isinstance(found, _Record):
        raise CorruptCheckpoint(f"{file}: it holds a {type(found).__name__} instead of DCP's metadata")
    return found


def _object_paths(entries: Mapping[str, Any], planned: Any) -> dict[str, tuple[str, ...]]:
    """Return for each entry the keys of the nested dicts that it was saved in."""
    paths = planned if isinstance(planned, dict) else {}
    return {key: tuple(map(str, paths.get(key, (key,)))) for key in entries}


def _weight_names(folder: Path, entries: Mapping[str, Any], paths: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Return the names of a model's weights by the keys of their entries."""
    first = {path[0] for path in paths.values()}
    is_nested = bool(paths) and all(len(path) > 1 for path in paths.values())
    if is_nested and len(first) == 1:
        own = first.pop()
    elif _MODEL_KEY in first and any(path[0] == _MODEL_KEY and len(path) > 1 for path in paths.values()):
        own = _MODEL_KEY
    else:
        own = None
    names = {
        key: paths[key] if own is None else paths[key][1:]
        for key, entry in entries.items()
        if isinstance(entry, _TensorEntry) and (own is None or paths[key][0] == own)
    }
    deep = next((paths[key] for key, name in names.items() if len(name) != 1), None)
    if deep is not None or not names:
        what = "no tensors" if deep is None else f"{' / '.join(deep)[:200]!a}, which is not a weight of a model"
        raise CheckpointError(
            f"{folder}: it holds {what}; give the folder of a model's weights, such as {_MODEL_FOLDER} (an optimizer's "
            "state cannot be merged)"
        )
    return {key: name[0] for key, name in names.items()}


def _chunk_places(storage: Mapping[_Record, _Record]) -> dict[tuple[str, tuple[int, ...]], _Record]:
    return {(index.get("fqn"), tuple(index.get("offset") or ())): place for index, place in storage.items()}


def _stored_tensor(
    folder: Path, key: str, entry: _TensorEntry, places: Mapping[tuple[str, tuple[int, ...]], _Record]
) -> _StoredTensor:
    dtype, shape = entry.get("properties").state, tuple(entry.get("size"))
    dtype = dtype[0] if isinstance(dtype, tuple) else dtype.get("dtype")
    regions = [Region(tuple(chunk.get("offsets")), tuple(chunk.get("sizes"))) for chunk in entry.get("chunks")]
    if not isinstance(dtype, torch.dtype) or not covers_exactly(regions, shape):
        raise CorruptCheckpoint(f"{folder / METADATA}: the chunks of {key!a} do not make one whole tensor")
    chunks = [_chunk(folder, key, region, dtype, places[key, region.offsets]) for region in regions if region.size]
    return _StoredTensor(dtype, shape, tuple(chunks))


def _chunk(folder: Path, key: str, region: Region, dtype: torch.dtype, place: _Record) -> _Chunk:
    file, offset, length = (place.get(name) for name in ("relative_path", "offset", "length"))
    extensions = place.get("transform_descriptors")
    if extensions:
        raise CheckpointError(
            f"{folder / METADATA}: {key!a} was written with an extension, such as compression, which is not supported: "
            f"{extensions!a:.100}"
        )
    if not isinstance(file, str) or not _FILE_NAME.fullmatch(file):
        raise CorruptCheckpoint(
            f"{folder / METADATA}: {key!a} is in the file {file!a:.100}, which is not in the folder"
        )
    size = check_plain_file(folder / file).stat().st_size
    # A chunk is stored uncompressed, so the size of the files limits the bytes to read and their memory.
    if not (offset >= 0 and length >= region.size * dtype.itemsize and offset + length <= size):
        raise CorruptCheckpoint(f"{folder / file}: it has {size} bytes, and does not hold the chunk of {key!a}")
    return _Chunk(region, file, offset, length)
