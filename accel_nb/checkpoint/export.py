"""Export for other libraries: weights as safetensors with Hugging Face's index file, and single values."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from accel_nb.checkpoint.encoding import encode, lacks_memory
from accel_nb.config.byte_sizes import read_bytes
from accel_nb.errors import CheckpointError, MisuseError

_SHARD = re.compile(r"model(-[0-9]{5}-of-[0-9]{5})?\.safetensors(\.index\.json)?")


class WeightWriter:
    """Writes ``model.safetensors``, or shards with ``model.safetensors.index.json``, of tensors in the order they come.

    With ``dtype`` floating-point tensors are converted to it. Holds the tensors of at most one file. Before
    `finish`, only temporary files are written, and existing files stay as they are. `finish` also raises earlier
    errors, so that ranks that gather the tensors can iterate over all of them. Raises `MisuseError` for an invalid size
    or dtype.
    """

    def __init__(
        self, folder: str | os.PathLike[str], max_shard_size: int | str, dtype: torch.dtype | None = None
    ) -> None:
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise MisuseError(f"dtype is {dtype!r}; weights are saved in a floating point format, as torch.bfloat16")
        self._dtype = dtype
        self._folder = Path(folder)
        self._limit = self._room = read_bytes(max_shard_size, "max_shard_size", least=1)
        self._shard: dict[str, Tensor] = {}
        self._written: list[dict[str, int]] = []  # of each file, the bytes of each tensor
        self._problem: Exception | None = None

    def add(self, name: str, value: Any) -> None:
        """Add a tensor, on any device; for another value `finish` raises `CheckpointError`."""
        if self._problem is not None:
            return
        try:
            if not isinstance(value, Tensor):
                raise CheckpointError(f"{name}: only tensors can be saved as weights; save_state() keeps the rest")
            value = value.detach().to("cpu", self._dtype if value.is_floating_point() else None)
            if lacks_memory(value):
                raise CheckpointError(
                    f"{name}: a {type(value).__qualname__} has no memory of its own, so no safetensors file holds it; "
                    "write torch.save(accelerator.get_state_dict(model), PATH) on the main process"
                )
            if self._shard and value.nbytes > self._room:
                self._write()
            self._shard[name] = copy_if_shared(value, self._shard.values())
            self._room -= value.nbytes
        except Exception as error:  # raised by `finish`
            self._problem = error
            self._shard = {}

    def finish(self) -> None:
        """Write the last file and the index, rename the files, and remove the files of an earlier save.

        Raises the first error of `add` or of writing, without leaving temporary files.
        """
        if self._problem is None and (self._shard or not self._written):
            try:
                self._write()
            except Exception as error:  # raised below, without the files
                self._problem = error
        count = len(self._written)
        if self._problem is not None:
            for number in range(count):
                self._temporary(number).unlink(missing_ok=True)
            raise self._problem
        names = [_shard_name(number, count) for number in range(count)]
        for old in self._folder.iterdir():
            if _SHARD.fullmatch(old.name) and old.name not in names:
                old.unlink()
        for number, name in enumerate(names):
            os.replace(self._temporary(number), self._folder / name)
        if count > 1:
            total = sum(size for sizes in self._written for size in sizes.values())
            places = {key: name for name, sizes in zip(names, self._written, strict=True) for key in sizes}
            index = {"metadata": {"total_size": total}, "weight_map": places}
            (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    def _write(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        number = len(self._written)
        self._written.append({name: value.nbytes for name, value in self._shard.items()})
        save_file(self._shard, self._temporary(number), metadata={"format": "pt"})
        self._shard, self._room = {}, self._limit

    def _temporary(self, number: int) -> Path:
        return self._folder / f".model-{number + 1:05}.safetensors.tmp"


def drop_tied_duplicates(weights: Mapping[str, Any], ties: Iterable[Sequence[str]] = ()) -> dict[str, Any]:
    """Return the weights with one name for each tensor.

    Tensors are the same if address, shape, strides, dtype and conjugate and negative bits are equal. For shards, empty
    tensors and tensors without memory, ``ties`` decides: the names in each of its groups are one tensor.
    """
    later = {name for first, *others in ties for name in others}
    kept: dict[str, Any] = {}
    seen: set[tuple[Any, ...]] = set()
    for name, value in weights.items():
        if isinstance(value, Tensor) and value.numel() and not lacks_memory(value):
            place = value.data_ptr(), tuple(value.shape), value.stride(), value.dtype, value.is_conj(), value.is_neg()
            if place in seen:
                continue
            seen.add(place)
        elif name in later:
            continue
        kept[name] = value
    return kept


def save_value(value: Any, path: str | os.PathLike[str], *, as_safetensors: bool = False) -> None:
    """Write a value in the format of the path's suffix; raises `CheckpointError` for a value that cannot be stored."""
    target = Path(path)
    encoded = encode(value)
    if as_safetensors or target.suffix == ".safetensors":
        if not isinstance(value, dict) or not all(
            isinstance(key, str) and isinstance(item, Tensor) for key, item in value.items()
        ):
            raise CheckpointError(f"{target}: a safetensors file holds a dict of tensors by name, and nothing else")
        tensors: dict[str, Tensor] = {}
        for key, item in drop_tied_duplicates(value).items():
            tensors[key] = copy_if_shared(item.detach().cpu(), tensors.values())
        save_file(tensors, target)
    elif target.suffix == ".json":
        if encoded.leaves:
            raise CheckpointError(f"{target}: {next(iter(encoded.leaves))} is a tensor; use the ending .safetensors")
        target.write_bytes(encoded.to_bytes())
    else:
        torch.save(value, target)


def copy_if_shared(value: Tensor, others: Iterable[Tensor]) -> Tensor:
    """Return a contiguous tensor that shares no memory with others, as safetensors requires.

    Lazy conjugations and negations are computed (`resolve_conj`, `resolve_neg`).
    """
    value = value.resolve_conj().resolve_neg()
    storages = {other.untyped_storage().data_ptr() for other in others}
    if value.untyped_storage().data_ptr() in storages:
        return value.clone(memory_format=torch.contiguous_format)
    return value.contiguous()


def _shard_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number + 1:05}-of-{count:05}.safetensors"
