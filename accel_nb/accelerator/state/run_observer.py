"""The events of a run that other parts of an accelerator react to."""

from __future__ import annotations

from typing import Any, Protocol

from torch.utils.data import DataLoader

from accel_nb.accelerator.state.save_report import CompletedSave
from accel_nb.accelerator.training.optimizer_proxy import ScheduleObserver


class RunObserver(Protocol):
    """Receives the events of a run; every rank calls its own."""

    @property
    def schedule_observer(self) -> ScheduleObserver | None:
        """Observer of the steps of schedulers that are prepared from now on, or None."""
        ...

    def on_loader_prepared(self, loader: DataLoader[Any]) -> None:
        """React to a loader that has just been prepared."""
        ...

    def on_loop_start(self, loader: DataLoader[Any]) -> None:
        """React to a loop over a prepared loader, whether it trains or not."""
        ...

    def on_epoch_start(self) -> None:
        """React to an epoch of a divided loader, before its first batch is read."""
        ...

    def on_batch_end(self) -> None:
        """React to the end of a batch, before the next one is read. This is on the hot path.

        May raise an exception that ends the loop, after the same step on every rank.
        """
        ...

    def on_checkpoint_saved(self, saved: CompletedSave) -> None:
        """React to a checkpoint that is complete."""
        ...

    def on_checkpoint_loaded(self, step: int) -> None:
        """React to a checkpoint of ``step`` that was loaded."""
        ...
