"""Progress of a run, computed from its loops over loaders and from the range of the cell's outermost loop."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from accel_nb.ui.messages import ProgressFacts


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """Unit and number of the iterations of a cell's outermost loop, from its code."""

    counts: Literal["epochs", "steps"]
    total: int


class _Loop(NamedTuple):
    """A loop over a loader: the step and the number of the loader's earlier epochs at its begin, and its length."""

    loader: int
    step: int
    epoch: int
    num_steps: int


class Progress:
    """Counts the epochs of a run: the repeated loops over the loader that it trains on.

    A loop over another loader does not end the epoch, since it may be an evaluation. If more steps follow than an epoch
    has, the run has trained on the other loader since that loop began.
    """

    def __init__(self, plan: LoopPlan | None = None) -> None:
        self._plan = plan
        self._loader: int | None = None
        self._epoch = 0
        self._num_untrained = 0
        """How many of the loader's epochs were loops without a step, or evaluations before the run trained on it."""
        self._num_earlier = 0
        """The number of epochs on the loaders that the run has trained on before."""
        self._began_at: int | None = None
        """The step at which the epoch began."""
        self._length: float = 0
        """The number of steps of the last complete epoch, or the expected number before there is one."""
        self._is_measured = False
        self._other: _Loop | None = None
        """The last loop over another loader since the epoch began."""
        self._start: tuple[int, int] | None = None
        """The numbers of epochs and of steps at the first loop, which are those of a checkpoint if the run resumes."""

    def begin_epoch(self, loader: int, step: int, epoch: int, num_steps: int, num_losses: int = 1) -> None:
        """Record that a loop over a loader begins after ``step``.

        ``epoch`` is the number of its earlier epochs. ``num_steps`` is the expected number of steps for each of the
        ``num_losses`` losses, which have an optimizer each.
        """
        if self._start is None:
            self._start = epoch, step
        num_done = step - (self._began_at or 0)
        if loader == self._loader:
            if num_done:
                self._length, self._is_measured = num_done, True
            else:
                self._num_untrained += epoch - self._epoch  # a loop that trained nothing
            self._epoch, self._began_at, self._other = epoch, step, None
        elif self._loader is None or not num_done:
            self._train_on(loader, step, epoch, num_steps)
        elif self._other is not None and num_done > self._expected_length(num_losses):
            self._num_earlier = self._num_done + 1
            self._train_on(*self._other)
            self._num_untrained = self._epoch  # these loops were evaluations
            self.begin_epoch(loader, step, epoch, num_steps, num_losses)
        else:
            self._other = _Loop(loader, step, epoch, num_steps)

    def _train_on(self, loader: int, step: int, epoch: int, num_steps: int) -> None:
        self._loader, self._began_at, self._epoch = loader, step, epoch
        self._num_untrained = 0
        self._length, self._is_measured, self._other = num_steps, False, None

    @property
    def _num_done(self) -> int:
        return self._num_earlier + self._epoch - self._num_untrained

    def _expected_length(self, num_losses: int) -> float:
        # If several optimizers step on each batch, an epoch has more steps than batches; complete ones are counted.
        return self._length * (1 if self._is_measured else max(1, num_losses))

    def facts(self, step: int, elapsed_s: float, num_losses: int, *, is_over: bool) -> ProgressFacts:
        """Return the progress after a step, ``elapsed_s`` after the first one began."""
        in_epoch = 0 if self._began_at is None else max(0, step - self._began_at)
        length = self._expected_length(num_losses)
        part = min(1.0, in_epoch / length) if length and in_epoch else None
        plan, fraction, begun = self._plan, None, 0.0
        num_epochs = plan.total if plan is not None and plan.counts == "epochs" else 0
        start_epoch, start_step = self._start or (0, 0)
        if plan is not None and plan.counts == "steps":
            per_step = 1 / plan.total / max(1, num_losses)
            fraction, begun = step * per_step, start_step * per_step
        elif num_epochs and (self._num_done or part is not None):
            fraction, begun = (self._num_done + (part or 0.0)) / num_epochs, start_epoch / num_epochs
        if fraction is not None and not 0 <= fraction <= 1 + 1e-9:
            fraction = None  # the loop ran longer than its code suggests
        remaining_s = None
        if fraction is not None and fraction > begun and not is_over and math.isfinite(elapsed_s):
            remaining_s = elapsed_s * (1 - fraction) / (fraction - begun)
        return {
            "epoch": self._num_done + (in_epoch > 0),
            "num_epochs": num_epochs,
            "batch_fraction": part,
            "fraction": fraction,
            "remaining_s": remaining_s,
        }
