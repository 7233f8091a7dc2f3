"""Resuming from a checkpoint at the start of the first training loop, and the description of the resumed state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import DataLoader

from accel_nb.accelerator.state.training_state import LoadReport, TrainingState
from accel_nb.data.loader import count_remaining, reset_epochs
from accel_nb.errors import NoCheckpoint


class RunResumer:
    """Loads the checkpoint to resume from when the first loop that trains begins: then its objects are prepared."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._from: str | None = None
        self._lines: list[str] = []

    def begin_run(self, resume: str | None) -> None:
        """Count epochs from here; ``resume`` is a path, ``auto`` for the newest checkpoint, or None."""
        self._state.end_replay()
        for loader in self._state.loaders():
            reset_epochs(loader)
        self._lines = []
        self._from = resume

    def end_run(self) -> list[str]:
        """Return lines about the checkpoint that the run has resumed."""
        if self._from is not None:
            self._lines.append(
                f"--resume {self._from} had no effect: no prepared DataLoader was iterated to train; load_state() "
                "loads at once"
            )
        lines, self._lines, self._from = self._lines, [], None
        return lines

    def load_once(self) -> None:
        """Load the checkpoint, if the run resumes from one and has not loaded it yet; every rank must call."""
        if self._from is None:
            return
        source, self._from = self._from, None
        try:
            report = self._state.load(None if source == "auto" else source, strict=True, skips_finished=True)
        except NoCheckpoint as error:
            if source != "auto":
                raise
            self._lines.append(f"started from the beginning: {error}")
            return
        self._lines.append(describe_resume(report, self._state.loaders()))


def describe_resume(report: LoadReport, loaders: Sequence[DataLoader[Any]]) -> str:
    """Return a line: the resumed step and epochs, the numbers of ranks before and now, and the exact parts."""
    before, now = report.saved_world_size, report.world_size
    parts = [f"resumed step {report.step} from {report.url}"]
    is_parallel = False
    for loader, position in zip(loaders, report.positions, strict=False):
        is_parallel = is_parallel or bool(loader.num_workers)
        if position.is_within_epoch or position.num_epochs:
            left = count_remaining(loader, position) if position.is_within_epoch else None
            rest = "" if left is None else f", {left:,} samples left"
            parts.append(f"epoch {position.num_epochs + 1}{rest}")
    parts.append(f"{before} -> {now} workers" if before != now else f"{now} worker{'s' if now > 1 else ''} as before")
    if before == now:
        parts.append("exact to the bit" + (", except random numbers of loader processes" if is_parallel else ""))
    else:
        parts.append("exact: weights, optimizer, order of samples; not: rounding, random numbers of other workers")
    return " · ".join([*parts, *report.notes])
