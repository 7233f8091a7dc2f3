"""Checks of loaders before they are sharded."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterDataPipe, MapDataPipe

from accel_nb.errors import MisuseError


def refuse_divided(loader: DataLoader[Any]) -> None:
    """Raise `MisuseError` for a loader that is divided among the ranks already."""
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    for candidate in (loader.sampler, sampler, getattr(sampler, "sampler", None)):
        if isinstance(candidate, DistributedSampler) and candidate.num_replicas > 1:
            raise MisuseError(
                f"the loader's DistributedSampler divides it among {candidate.num_replicas} ranks already: "
                "leave the sampler out (shuffle=True instead), or do not prepare this loader"
            )
    if isinstance(loader.dataset, IterDataPipe | MapDataPipe):
        raise MisuseError("torch divides a datapipe among the ranks by itself: do not prepare this loader")
