"""Files for others: weights as safetensors with the index that model libraries read, and plain values."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from accel_nb.checkpoint.encoding import encode
from accel_nb.errors import CheckpointError, MisuseError

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"([0-9]{1,9})\s*([KMGT]I?B)", re.IGNORECASE)
_SHARD = re.compile(r"model(-[0-9]{5}-of-[0-9]{5})?\.safetensors(\.index\.json)?")


def save_weights(weights: Mapping[str, Any], folder: str | os.PathLike[str], max_shard_size: int | str) -> None:
    """Write ``model.safetensors``, or shards with ``model.safetensors.index.json``; tied tensors once.

    Raises `MisuseError` for a size that is none, `CheckpointError` for values that are no tensors.
    """
    limit = _bytes_of(max_shard_size)
    odd = [name for name, value in weights.items() if not isinstance(value, Tensor)]
    if odd:
        raise CheckpointError(f"{', '.join(odd)}: only tensors can be saved as weights; save_state() keeps the rest")
    shards: list[dict[str, Tensor]] = [{}]
    room = limit
    for name, value in _once(weights).items():
        size = value.numel() * value.element_size()
        if shards[-1] and size > room:
            shards.append({})
            room = limit
        shards[-1][name] = value
        room -= size
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    names = [_shard_name(number, len(shards)) for number in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, target / f".{name}.tmp", metadata={"format": "pt"})
    for old in target.iterdir():
        if _SHARD.fullmatch(old.name) and old.name not in names:
            old.unlink()
    for name in names:
        os.replace(target / f".{name}.tmp", target / name)
    if len(shards) > 1:
        total = sum(value.numel() * value.element_size() for shard in shards for value in shard.values())
        places = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def save_plain(value: Any, path: str | os.PathLike[str]) -> None:
    """Write a value in the format of the path's ending; raises `CheckpointError` for what is not plain."""
    target = Path(path)
    encoded = encode(value)
    if target.suffix == ".safetensors":
        if not isinstance(value, dict) or not all(
            isinstance(key, str) and isinstance(item, Tensor) for key, item in value.items()
        ):
            raise CheckpointError(f"{target}: a safetensors file holds a dict of tensors by name, and nothing else")
        save_file({key: item.detach().cpu().contiguous() for key, item in _once(value).items()}, target)
    elif target.suffix == ".json":
        if encoded.leaves:
            raise CheckpointError(f"{target}: {next(iter(encoded.leaves))} is a tensor; use the ending .safetensors")
        target.write_bytes(encoded.text())
    else:
        torch.save(value, target)


def _once(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights without names of a tensor that has another name already, each in memory of its own."""
    kept: dict[str, Tensor] = {}
    seen: set[tuple[Any, ...]] = set()
    storages: set[int] = set()
    for name, value in weights.items():
        place = value.data_ptr(), tuple(value.shape), value.stride(), value.dtype
        if value.numel() and place in seen:
            continue
        seen.add(place)
        storage = value.untyped_storage().data_ptr()
        kept[name] = value.clone(memory_format=torch.contiguous_format) if storage in storages else value.contiguous()
        storages.add(storage)
    return kept


def _shard_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number + 1:05}-of-{count:05}.safetensors"


def _bytes_of(size: int | str) -> int:
    match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    number = int(match[1]) * _UNITS[match[2].upper()] if match else size
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise MisuseError(f"max_shard_size is {size!r}; give a number of bytes, or text such as '500MB' or '5GB'")
    return number
