"""Progress of a run, computed from its loops over loaders and from the range of the cell's outermost loop."""

from __future__ import annotations

import math
from dataclasses import dataclass

from accel_nb.ui.messages import ProgressFacts


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """Whether a cell's outermost loop counts epochs or steps, and how many, as found in its code."""

    counts: str
    """``epochs`` or ``steps``."""
    total: int


class Progress:
    """Counts the epochs of a run. A loop over a loader without a step, such as an evaluation, is not an epoch."""

    def __init__(self, plan: LoopPlan | None = None) -> None:
        self._plan = plan
        self._num_done = 0
        self._steps_before = 0
        self._began_at: int | None = None
        self._length: float = 0
        """The number of steps of the last complete epoch; before there is one, the loader's number of batches."""

    def begin_epoch(self, step: int, num_batches: int) -> None:
        """Record that a loop over a loader begins after step number ``step``."""
        if self._began_at is not None and step > self._began_at:
            self._num_done += 1
            self._length = step - self._began_at
        elif self._num_done == 0:
            self._length = num_batches
        self._began_at = step

    def facts(self, step: int, elapsed_s: float, num_losses: int, *, is_over: bool) -> ProgressFacts:
        """Return the progress after a step, ``elapsed_s`` after the first one began."""
        in_epoch = 0 if self._began_at is None else max(0, step - self._began_at)
        # If several optimizers step on each batch, the first epoch has more steps than batches; later ones are counted.
        length = self._length * (max(1, num_losses) if self._num_done == 0 else 1)
        part = min(1.0, in_epoch / length) if length and in_epoch else None
        plan, fraction = self._plan, None
        num_epochs = plan.total if plan is not None and plan.counts == "epochs" else 0
        if plan is not None and plan.counts == "steps":
            fraction = step / plan.total / max(1, num_losses)
        elif num_epochs and (self._num_done or part is not None):
            fraction = (self._num_done + (part or 0.0)) / num_epochs
        if fraction is not None and not 0 <= fraction <= 1 + 1e-9:
            fraction = None  # the loop ran longer than its code suggests
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
