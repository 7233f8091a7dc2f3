"""Conversion of checkpoints in one process: the weights alone, or the state divided for another number of ranks."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accel_nb.checkpoint.dcp_format import is_dcp_folder, open_dcp_weights, remove_dcp_files
from accel_nb.checkpoint.encoding import DTYPE_NAMES, encode, leaf_tensor
from accel_nb.checkpoint.export import WeightWriter, drop_tied_duplicates
from accel_nb.checkpoint.load import materialize, open_checkpoint
from accel_nb.checkpoint.save import SavePlan, abandon, check_name_is_free, commit, live_buffers, write_rank_files
from accel_nb.checkpoint.store_url import open_store, split_url
from accel_nb.checkpoint.write_plan import TensorPlan, plan_writes
from accel_nb.errors import CheckpointError
from accel_nb.runtime.distributed.communicator import LocalComm

PICKLED_WEIGHTS = "pytorch_model.bin"


class MergedWeights(NamedTuple):
    """The number of tensors that `merge` wrote, and the entries of the checkpoint that are not weights of the model."""

    num_tensors: int
    left_out: tuple[str, ...]


def load_weights(url: str | os.PathLike[str], model: int = 0) -> dict[str, Tensor]:
    """Return the weights of one of the checkpoint's models; raises `CheckpointError` if there is none."""
    tree = open_checkpoint(url, LocalComm()).read_tree()
    models = tree.get("models") if isinstance(tree, Mapping) else None
    if not isinstance(models, list) or not 0 <= model < len(models):
        count = len(models) if isinstance(models, list) else 0
        raise CheckpointError(f"{os.fspath(url)}: there is no model {model}; it holds {count}, counted from 0")
    values: dict[str, Any] = materialize(models[model]["values"])
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def merge(
    url: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    model: int = 0,
    max_shard_size: int | str = sys.maxsize,
    *,
    as_safetensors: bool = True,
    removes_shards: bool = False,
) -> MergedWeights:
    """Write the weights of one model of a checkpoint, or of a folder of ``torch.distributed.checkpoint`` (DCP).

    The files are ``model.safetensors`` or shards of it, else the one file ``pytorch_model.bin`` of torch.save. With
    ``removes_shards`` the files of DCP are removed afterwards. Raises `CheckpointError`, and then removes nothing.
    """
    is_dcp = is_dcp_folder(url)
    if removes_shards and not is_dcp:
        raise CheckpointError(f"{os.fspath(url)}: there are no shards of torch.distributed.checkpoint to remove")
    if is_dcp and model:
        raise CheckpointError(
            f"{os.fspath(url)}: there is no model {model}; a folder of torch.distributed.checkpoint holds one, number 0"
        )
    if is_dcp:
        stored = open_dcp_weights(url)
        weights, left_out = stored.tensors(), stored.left_out
    else:
        weights, left_out = drop_tied_duplicates(load_weights(url, model)).items(), ()
    num_tensors = _write_safetensors(weights, folder, max_shard_size) if as_safetensors else _pickle(weights, folder)
    if removes_shards:
        remove_dcp_files(url)
    return MergedWeights(num_tensors, left_out)


def _write_safetensors(
    weights: Iterable[tuple[str, Any]], folder: str | os.PathLike[str], max_shard_size: int | str
) -> int:
    files = WeightWriter(folder, max_shard_size)
    num_tensors = 0
    for name, value in weights:
        files.add(name, value)
        num_tensors += 1
    files.finish()
    return num_tensors


def _pickle(weights: Iterable[tuple[str, Any]], folder: str | os.PathLike[str]) -> int:
    merged, target = dict(weights), Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    partial = target / f"{PICKLED_WEIGHTS}.part"
    try:
        torch.save(merged, partial)
        os.replace(partial, target / PICKLED_WEIGHTS)
    finally:
        partial.unlink(missing_ok=True)
    return len(merged)


def reshard(url: str | os.PathLike[str], target: str | os.PathLike[str], num_ranks: int) -> str:
    """Write the same checkpoint as ``num_ranks`` ranks would, and return its URL; the source is not changed.

    Raises `CheckpointError` if the target exists.
    """
    source = open_checkpoint(url, LocalComm())
    encoded = encode(materialize(source.read_tree()))
    plans = [
        TensorPlan(path, DTYPE_NAMES[leaf_tensor(leaf).dtype], tuple(leaf_tensor(leaf).shape), "replicated")
        for path, leaf in encoded.leaves.items()
    ]
    root, name = split_url(target)
    store, save_id = open_store(root), uuid.uuid4().hex[:12]
    if name in store.folders():
        raise CheckpointError(f"{store.url}/{name} exists; give a folder that does not")
    check_name_is_free(store, name, source.manifest.origin.run)
    suffix = "" if store.supports_rename else f"-{save_id}"
    writes = plan_writes(plans, [{}] * num_ranks, suffix)
    folder = store.begin(name, save_id)
    state = encoded.to_bytes()
    rank_plans = [
        SavePlan(store, name, folder, save_id, source.manifest.origin, state, writes, encoded.leaves, rank, suffix)
        for rank in range(num_ranks)
    ]
    try:
        parts = [write_rank_files(plan, lambda tasks: live_buffers(encoded.leaves, tasks)) for plan in rank_plans]
    except BaseException:
        abandon(rank_plans[0])
        raise
    commit(rank_plans[0], parts)
    return rank_plans[0].url
