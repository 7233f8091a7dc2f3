"""Weights in files of torch.save, for libraries that ask for them; each file is tensors only."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from accel_nb.bigmodel.planning.sizes import parse_bytes
from accel_nb.compat.constants import WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_PATTERN_NAME


def save_with_torch(
    state: Mapping[str, Tensor], folder: str | os.PathLike[str], max_shard_size: int | str, *, writes: bool
) -> None:
    """Write a state dict to one file, or to several of at most ``max_shard_size`` with an index of their tensors."""
    if not writes:
        return
    limit = parse_bytes(max_shard_size, "max_shard_size")
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
