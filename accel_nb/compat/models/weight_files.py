"""Files of a model's weights: of torch.save (tensors only), and of models with offloaded weights."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from accel_nb.bigmodel.offload import dispatch
from accel_nb.bigmodel.planning.sizes import list_tensors
from accel_nb.compat.constants import WEIGHTS_INDEX_NAME, WEIGHTS_PATTERN_NAME
from accel_nb.compat.models.offloaded_files import get_state_dict_offloaded_model
from accel_nb.config.byte_sizes import read_bytes

_FILE = re.compile(r"pytorch_model(-[0-9]{5}-of-[0-9]{5})?\.bin(\.index\.json)?")


def save_with_torch(
    state: Mapping[str, Tensor], folder: str | os.PathLike[str], max_shard_size: int | str, *, writes: bool
) -> None:
    """Write a state dict to one file, or to several of at most ``max_shard_size`` with an index of their tensors.

    Files of an earlier save in the folder are removed.
    """
    if not writes:
        return
    limit = read_bytes(max_shard_size, "max_shard_size")
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, value in state.items():
        nbytes = value.numel() * value.element_size()
        if shards[-1] and size + nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = value
        size += nbytes
    target, count = Path(folder), len(shards)
    target.mkdir(parents=True, exist_ok=True)
    suffixes = [""] if count == 1 else [f"-{number:05d}-of-{count:05d}" for number in range(1, count + 1)]
    files = [WEIGHTS_PATTERN_NAME.format(suffix=suffix) for suffix in suffixes]
    partial = [target / f".{file}.tmp" for file in files]
    try:
        for path, shard in zip(partial, shards, strict=True):
            torch.save(shard, path)
        for old in target.iterdir():  # a reader would read these files of an earlier save instead
            if _FILE.fullmatch(old.name) and old.name not in files:
                old.unlink()
        for path, file in zip(partial, files, strict=True):
            os.replace(path, target / file)
    finally:
        for path in partial:
            path.unlink(missing_ok=True)
    if count > 1:
        total = sum(value.numel() * value.element_size() for value in state.values())
        places = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (target / WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2))


def has_absent_weights(model: nn.Module) -> bool:
    """Return whether a model has weights on the meta device, since they are offloaded."""
    return any(value.is_meta for value in model.state_dict(keep_vars=True).values() if isinstance(value, Tensor))


def read_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and values of a model's ``state_dict``, with those of offloaded weights."""
    if dispatch.has_offloaded_params(model):
        yield from dispatch.offloaded_weights(model)
    else:
        yield from get_state_dict_offloaded_model(model).items()


def save_offloaded(
    model: nn.Module, folder: str | os.PathLike[str], max_shard_size: int | str, *, writes: bool
) -> None:
    """Write a model with offloaded weights as safetensors; the tensors of one file at a time are in memory."""
    from accel_nb.checkpoint.export import WeightWriter

    if not writes:
        return
    repeated = {name for tensor in list_tensors(model) for name in tensor.names[1:]}
    files = WeightWriter(folder, max_shard_size)
    for name, value in read_weights(model):
        if name not in repeated:
            files.add(name, value)
    files.finish()
