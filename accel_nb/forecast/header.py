"""Sizes of weights from the headers of safetensors files: no tensor is read, no torch is imported."""

from __future__ import annotations

import mmap
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

from accel_nb.checkpoint.layout import DTYPES, TensorPlace, read_header
from accel_nb.errors import ConfigError, CorruptCheckpoint
from accel_nb.forecast.sizes import Model, Weight

SUFFIX = ".safetensors"
_NUMBERED = re.compile(r"^(.*?)\.?(\d+)\.")


def read_safetensors(path: Path) -> Model:
    """Return the model that a safetensors file, or all such files of a folder, hold.

    Integer tensors count as buffers. Raises `ConfigError` for missing or invalid files.
    """
    files = sorted(path.glob("*" + SUFFIX)) if path.is_dir() else [path]
    if not files:
        raise ConfigError(f"{path} holds no *{SUFFIX} file")
    tensors: dict[str, TensorPlace] = {}
    for file in files:
        found = _read_places(file)
        twice = sorted(set(found) & set(tensors))
        if twice:
            raise ConfigError(f"{file}: tensor {twice[0][:200]!a} is in another file of the folder too")
        tensors |= found
    blocks = numbered_blocks(tensors)
    weights = [
        Weight(name, place.shape, DTYPES[place.dtype][1], block=blocks.get(name))
        for name, place in tensors.items()
        if _is_weight(place)
    ]
    if not weights:
        raise ConfigError(f"{path} holds no tensors of floating point numbers")
    buffers = sum(place.end - place.start for place in tensors.values() if not _is_weight(place))
    return Model(path.name, tuple(weights), buffers)


def numbered_blocks(names: Iterable[str]) -> dict[str, str]:
    """Return the repeated block of each name that has one: ``h.0`` of ``h.0.mix.weight`` where there is ``h.1`` too."""
    blocks: dict[str, str] = {}
    lists: dict[str, set[str]] = {}
    for name in names:
        found = _NUMBERED.match(name)
        if found is not None:
            blocks[name] = found[0].rstrip(".")
            lists.setdefault(found[1], set()).add(found[2])
    repeated = {head for head, numbers in lists.items() if len(numbers) > 1}
    return {name: block for name, block in blocks.items() if block.rpartition(".")[0] in repeated}


def _is_weight(place: TensorPlace) -> bool:
    return place.dtype.startswith(("F", "BF", "C"))


def _read_places(path: Path) -> dict[str, TensorPlace]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size == 0:
            raise ConfigError(f"{path} is no file, or an empty one")
        with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as content, memoryview(content) as view:
            return read_header(view, str(path))
    except (CorruptCheckpoint, OSError) as error:
        raise ConfigError(str(error)) from None
    finally:
        os.close(descriptor)
