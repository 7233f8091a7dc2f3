"""Gradients that exist on some ranks only, and parameters whose gradients no wrapper averages."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.runtime.distributed.sharded import is_sharded


def any_rank_has_gradient(comm: Communicator, parameters: Sequence[Tensor]) -> list[bool]:
    """Return for each parameter whether any rank has its gradient; every rank must call with the same parameters."""
    if not parameters:
        return []
    present = torch.tensor([value.grad is not None for value in parameters], dtype=torch.int32, device="cpu")
    return [bool(found) for found in comm.all_reduce(present, "max").tolist()]


def fill_missing_gradients(comm: Communicator, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients that any rank has, set to zero on ranks that lack them.

    Every rank must call with the same parameters; all ranks get the same number of gradients.
    """
    gradients: list[Tensor] = []
    for value, is_present in zip(parameters, any_rank_has_gradient(comm, parameters), strict=True):
        if is_present:
            if value.grad is None:
                value.grad = torch.zeros_like(value)
            gradients.append(value.grad)
    return gradients


def is_only_in_plain_modules(parameter: Tensor) -> bool:
    """Return whether modules own a parameter, and none of them shards it or averages its gradient.

    Scans all objects of the process.
    """
    owners = _owners(parameter)
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kinds = (DistributedDataParallel, *(() if fsdp is None else (fsdp.FullyShardedDataParallel,)))
    averages = any(isinstance(owner, kinds) for owner in owners)
    return bool(owners) and not averages and not is_sharded(parameter)


def is_in_no_module(parameter: Tensor) -> bool:
    """Return whether no module owns a parameter; scans all objects of the process."""
    return not _owners(parameter)


def _owners(parameter: Tensor) -> list[nn.Module]:
    # A module whose constructor has not finished may lack `training` and the attributes that `parameters` reads.
    modules = [item for item in gc.get_objects() if issubclass(type(item), nn.Module) and "training" in vars(item)]
    return [module for module in modules if any(value is parameter for value in module.parameters())]
