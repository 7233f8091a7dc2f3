"""A loader that the first process reads for all processes, for code that prepares loaders without an `Accelerator`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from accel_nb.compat.states import GradientState
from accel_nb.config.sections import DataOptions
from accel_nb.data.loader import shard_loader
from accel_nb.data.order import BatchShare
from accel_nb.runtime.distributed.current_world import current_comm


class _LoopReporter:
    """Reports loops over one loader to the shared `GradientState`; every loop counts as a training loop."""

    def __init__(self) -> None:
        self._loader: DataLoader[Any] | None = None

    def is_training(self) -> bool:
        """Return True."""
        return True

    def on_loop_start(self, loader: DataLoader[Any]) -> None:
        """Record that the loader is being iterated."""
        self._loader = loader
        GradientState()._add_dataloader(loader)

    def on_epoch_start(self, loader: DataLoader[Any]) -> bool:
        """Return True."""
        return True

    def on_batch_end(self) -> None:
        """Do nothing."""

    def on_read(self, started: float, cpu_started: float) -> None:
        """Do nothing."""

    def on_share(self, share: BatchShare | None) -> None:
        """Record the end of the iteration."""
        if share is None:
            GradientState()._remove_dataloader(self._loader)
            self._loader = None

    def on_whole_batch(self, iterator: Iterator[Any] | None, num_samples: int | None) -> None:
        """Do nothing."""

    def num_trained(self) -> int:
        """Return 0: positions of these loaders are not saved."""
        return 0


def dispatch_loader(
    loader: DataLoader[Any],
    device: torch.device | str | int | None,
    *,
    split_batches: bool,
    even_batches: bool,
    use_seedable_sampler: bool,
    data_seed: int | None,
    non_blocking: bool,
) -> DataLoader[Any]:
    """Make a loader yield this process's part of the batches that the first process reads; every process must iterate.

    With ``split_batches`` each batch is divided, else each process gets batches of the loader's size. Repeats samples
    at the end if ``even_batches`` is set.
    """
    options = DataOptions(
        dispatch_batches=True,
        even_batches=even_batches,
        use_seedable_sampler=use_seedable_sampler,
        data_seed=data_seed,
        non_blocking=non_blocking,
    )
    return shard_loader(
        loader,
        comm=current_comm(),
        batch="global" if split_batches else "per-worker",
        device=torch.device("cpu" if device is None else device),
        observer=_LoopReporter(),
        options=options,
    )
