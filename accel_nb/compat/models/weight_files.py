"""Files of a model's weights: of torch.save (tensors only), and of models with offloaded weights."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from accel_nb.bigmodel.offload import dispatch
from accel_nb.bigmodel.planning.sizes import list_tensors
from accel_nb.compat.constants import WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_PATTERN_NAME
from accel_nb.compat.models.offloaded_files import get_state_dict_offloaded_model
from accel_nb.config.byte_sizes import read_bytes


def save_with_torch(
    state: Mapping[str, Tensor], folder: str | os.PathLike[str], max_shard_size: int | str, *, writes: bool
) -> None:
    """Write a state dict to one file, or to several of at most ``max_shard_size`` with an index of their tensors."""
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
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    if len(shards) == 1:
        torch.save(shards[0], target / WEIGHTS_NAME)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = WEIGHTS_PATTERN_NAME.format(suffix=f"-{number:05d}-of-{len(shards):05d}")
        torch.save(shard, target / file)
        weight_map.update(dict.fromkeys(shard, file))
    total = sum(value.numel() * value.element_size() for value in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
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
