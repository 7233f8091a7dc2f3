"""Conversion of checkpoints in one process: the weights alone, or the state divided for another number of ranks."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from accel_nb.checkpoint.encoding import DTYPE_NAMES, encode, leaf_tensor
from accel_nb.checkpoint.load import materialize, open_checkpoint
from accel_nb.checkpoint.save import SavePlan, abandon, check_name_is_free, commit, live_buffers, write_share
from accel_nb.checkpoint.store_url import open_store, split_url
from accel_nb.checkpoint.write_plan import TensorPlan, plan_writes
from accel_nb.errors import CheckpointError
from accel_nb.runtime.distributed.communicator import LocalComm


def load_weights(url: str | os.PathLike[str], model: int = 0) -> dict[str, Tensor]:
    """Return the weights of one of the checkpoint's models; raises `CheckpointError` if there is none."""
    tree = open_checkpoint(url, LocalComm()).read_tree()
    models = tree.get("models") if isinstance(tree, Mapping) else None
    if not isinstance(models, list) or not 0 <= model < len(models):
        count = len(models) if isinstance(models, list) else 0
        raise CheckpointError(f"{os.fspath(url)}: there is no model {model}; it holds {count}, counted from 0")
    values: dict[str, Any] = materialize(models[model]["values"])
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def reshard(url: str | os.PathLike[str], target: str | os.PathLike[str], num_shares: int) -> str:
    """Write the same checkpoint as ``num_shares`` ranks would, and return its URL; the source is not changed.

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
    plan = plan_writes(plans, [{}] * num_shares, suffix)
    folder = store.begin(name, save_id)
    state = encoded.to_bytes()
    drafts = [
        SavePlan(store, name, folder, save_id, source.manifest.origin, state, plan, encoded.leaves, rank, suffix)
        for rank in range(num_shares)
    ]
    try:
        parts = [write_share(draft, lambda tasks: live_buffers(encoded.leaves, tasks)) for draft in drafts]
    except BaseException:
        abandon(drafts[0])
        raise
    commit(drafts[0], parts)
    return drafts[0].url
