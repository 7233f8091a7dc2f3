"""Progress of a run: from the lengths of its loops over loaders, and the range that the cell's code loops over."""

from __future__ import annotations

import math
from dataclasses import dataclass

from accel_nb.ui.messages import ProgressFacts


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """What a cell's outermost loop counts, read from its code, and how many of them there are."""

    counts: str
    """``epochs`` or ``steps``."""
    total: int


class Progress:
    """The epochs of a run. A loop over a loader in which no step is made, as an evaluation, is no epoch."""

    def __init__(self, plan: LoopPlan | None = None) -> None:
        self._plan = plan
        self._num_done = 0
        self._steps_before = 0
        self._began_at: int | None = None
        self._num_batches = 0
        self._length: float = 0
        """Steps of an epoch: of the last one, or as many as the loader has batches."""

    def begin_epoch(self, step: int, num_batches: int) -> None:
        """Record that a loop over a loader begins after a step."""
        if self._began_at is not None and step > self._began_at:
            self._num_done += 1
            self._length = step - self._began_at
        elif self._num_done == 0:
            self._length = num_batches
        self._began_at, self._num_batches = step, num_batches

    def facts(self, step: int, elapsed_s: float, num_losses: int, *, is_over: bool) -> ProgressFacts:
        """Return the progress after a step, ``elapsed_s`` after the first one began."""
        in_epoch = 0 if self._began_at is None else max(0, step - self._began_at)
        # Where several optimizers step in each batch, an epoch has so many more steps; after the first it is counted.
        length = self._length * (max(1, num_losses) if self._num_done == 0 else 1)
        part = min(1.0, in_epoch / length) if length and in_epoch else None
        plan, fraction = self._plan, None
        num_epochs = plan.total if plan is not None and plan.counts == "epochs" else 0
        if plan is not None and plan.counts == "steps":
            fraction = step / plan.total / max(1, num_losses)
        elif num_epochs and (self._num_done or part is not None):
            fraction = (self._num_done + (part or 0.0)) / num_epochs
        if fraction is not None and not 0 <= fraction <= 1 + 1e-9:
            fraction = None  # the code does something else than it seems to
        remaining_s = None
        if fraction and not is_over and math.isfinite(elapsed_s):
            remaining_s = elapsed_s * (1 - fraction) / fraction
        return {
            "epoch": self._num_done + (in_epoch > 0),
            "num_epochs": num_epochs,
            "batch_fraction": part,
            "fraction": fraction,
            "remaining_s": remaining_s,
        }
