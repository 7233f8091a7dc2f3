"""Checkpoints on disk for tests."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn


def save_single(model: nn.Module, folder: Path) -> Path:
    """Save a model as one file; a tied tensor is saved under its first name only."""
    path = folder / "model.safetensors"
    save_file(_distinct(model), path, {"format": "pt"})
    return path


def save_sharded(model: nn.Module, folder: Path, num_shards: int = 3) -> Path:
    """Save a model as several files with an index, whose path is returned."""
    tensors = _distinct(model)
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        own = {name: tensors[name] for name in names[shard::num_shards]}
        save_file(own, folder / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(own, file))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def save_zeros(model: nn.Module, folder: Path) -> Path:
    """Write a sparse file of zeros for a model, empty or not; return its path."""
    header: dict[str, object] = {}
    end = 0
    for name, tensor in _distinct(model).items():
        assert tensor.dtype == torch.float32
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    text = json.dumps(header).encode()
    path = folder / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + end)
    return path


def _distinct(model: nn.Module):
    kept = model.state_dict(keep_vars=True)
    seen = {id(tensor): name for name, tensor in reversed(kept.items())}
    return {name: tensor.detach().contiguous() for name, tensor in kept.items() if seen[id(tensor)] == name}
