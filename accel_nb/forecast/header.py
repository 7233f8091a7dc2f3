"""Sizes of weights from the headers of safetensors files: no tensor is read, no torch is imported."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

from accel_nb.errors import ConfigError, CorruptCheckpoint
from accel_nb.forecast.sizes import ModelSizes, WeightSize
from accel_nb.runtime.safetensors_header import DTYPES, SUFFIX, TensorEntry, read_file_header

_NUMBERED = re.compile(r"^(.*?)\.?(\d+)\.")


def read_safetensors(path: Path) -> ModelSizes:
    """Return the sizes of the model in a safetensors file, or in all such files of a folder.

    Integer tensors count as buffers. Raises `ConfigError` for missing or invalid files.
    """
    files = sorted(path.glob("*" + SUFFIX)) if path.is_dir() else [path]
    if not files:
        raise ConfigError(f"{path} holds no *{SUFFIX} file")
    tensors: dict[str, TensorEntry] = {}
    for file in files:
        found = _read_entries(file)
        twice = sorted(set(found) & set(tensors))
        if twice:
            raise ConfigError(f"{file}: tensor {twice[0][:200]!a} is in another file of the folder too")
        tensors |= found
    blocks = numbered_blocks(tensors)
    weights = [
        WeightSize(name, entry.shape, DTYPES[entry.dtype][1], block=blocks.get(name))
        for name, entry in tensors.items()
        if _is_weight(entry)
    ]
    if not weights:
        raise ConfigError(f"{path} holds no tensors of floating point numbers")
    buffers = sum(entry.end - entry.start for entry in tensors.values() if not _is_weight(entry))
    return ModelSizes(path.name, tuple(weights), buffers)


def numbered_blocks(names: Iterable[str]) -> dict[str, str]:
    """Return the repeated block of each name in one: ``h.0`` for ``h.0.mix.weight`` if ``h.1`` exists too."""
    blocks: dict[str, str] = {}
    lists: dict[str, set[str]] = {}
    for name in names:
        found = _NUMBERED.match(name)
        if found is not None:
            blocks[name] = found[0].rstrip(".")
            lists.setdefault(found[1], set()).add(found[2])
    repeated = {head for head, numbers in lists.items() if len(numbers) > 1}
    return {name: block for name, block in blocks.items() if block.rpartition(".")[0] in repeated}


def _is_weight(entry: TensorEntry) -> bool:
    return entry.dtype.startswith(("F", "BF", "C"))


def _read_entries(path: Path) -> dict[str, TensorEntry]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{path} is not a regular file")
        return read_file_header(descriptor, str(path))
    except (CorruptCheckpoint, OSError) as error:
        raise ConfigError(str(error)) from None
    finally:
        os.close(descriptor)
