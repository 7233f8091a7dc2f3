"""Interface through which a sharded loader reports its loops and batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from torch.utils.data import DataLoader

from accel_nb.data.order import BatchShare


class LoaderObserver(Protocol):
    """Decides how loops read a sharded loader, and receives their events. Each batch causes three calls."""

    def is_training(self) -> bool:
        """Return whether a loop that started now would train; the loader's length depends on it."""
        ...

    def on_loop_start(self, loader: DataLoader[Any]) -> None:
        """React to a loop over the loader, whether it trains or not, after `on_epoch_start`."""
        ...

    def on_epoch_start(self, loader: DataLoader[Any]) -> bool:
        """React to a loop that starts over ``loader``; return whether it trains.

        If it does not, the rank reads the whole loader as if it were not sharded, without messages and `on_share`.
        """
        ...

    def on_batch_end(self) -> None:
        """React to a loop that has finished a batch, before the next one is read."""
        ...

    def on_read(self, started: float, cpu_started: float) -> None:
        """Count a batch that was read since ``started`` (`perf_counter`) and ``cpu_started`` (`thread_time`)."""
        ...

    def on_share(self, share: BatchShare | None) -> None:
        """React to the share of a batch that is about to be yielded; None at the end of the loader."""
        ...

    def on_whole_batch(self, iterator: Iterator[Any] | None, num_samples: int | None) -> None:
        """React to a batch of ``num_samples`` of a loader that is read whole; None and None at its end."""
        ...

    def num_trained(self) -> int:
        """Return how many micro-batches have been applied to the weights or added to an open accumulation window."""
        ...
