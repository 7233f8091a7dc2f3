"""Objects that plain cells do not prepare: those that user code has distributed itself, and TorchScript modules.

User code distributes a model by wrapping it in DDP, and a loader by giving it a `DistributedSampler`. The forward of a
`ScriptModule` cannot be replaced for one instance, so every rank computes the whole batch with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.jit import ScriptModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, DistributedSampler


def select_preparable(objects: Iterable[Any]) -> list[Any]:
    """Return ``objects`` without TorchScript modules, DDP models with their optimizers, and distributed loaders."""
    listed = [item for item in objects if not isinstance(item, ScriptModule)]
    models = [item for item in listed if isinstance(item, nn.Module)]
    wrapped = [part for model in models for part in model.modules() if isinstance(part, DistributedDataParallel)]
    owned = {id(value) for part in wrapped for value in part.parameters()}
    return [
        item for item in listed if not (has_distributed_sampler(item) or (owned and has_any_parameter(item, owned)))
    ]


def has_distributed_sampler(item: Any) -> bool:
    """Return whether an object is a loader with a `DistributedSampler`."""
    if not isinstance(item, DataLoader):
        return False
    return isinstance(item.sampler, DistributedSampler) or isinstance(
        getattr(item.batch_sampler, "sampler", None), DistributedSampler
    )


def has_any_parameter(item: Any, parameter_ids: set[int]) -> bool:
    """Return whether a model, optimizer or scheduler has any of some parameters, which are given by their ``id()``."""
    if isinstance(item, nn.Module):
        return any(id(value) in parameter_ids for value in item.parameters())
    if isinstance(item, LRScheduler):
        item = item.optimizer
    groups = item.param_groups if isinstance(item, Optimizer) else ()
    return any(id(value) in parameter_ids for group in groups for value in group["params"])
