"""Saving by itself: each time so many steps or so much time has passed, or somebody asks, between two steps.

A loop asks for its next batch when it is done with the one before, schedulers and all: that is where a save is made.
Ranks have clocks of their own, so whether time is up, or a rank was asked to save, they settle among each other: with
one small message about twice a second, not at each step.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from accel_nb.runtime.comm import Communicator

_CHECK_S = 0.5
_MAX_STEPS = 1000


class Autosave:
    """Decides at each boundary between steps whether to save; every rank must come to the same boundaries."""

    def __init__(
        self,
        comm: Communicator,
        save: Callable[[], object],
        num_steps: Callable[[], int],
        *,
        steps: int | None = None,
        seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._comm = comm
        self._save = save
        self._num_steps = num_steps
        self._steps = steps
        self._seconds = seconds
        self._clock = clock
        self._is_asked = False
        # A loop has come to a boundary since `begin_run`.
        self.is_reached = False
        # Where the last boundary, the last save and the last message were.
        self._step = num_steps()
        self._saved_step = self._step
        self._saved_at = clock()
        self._told_step, self._told_at = self._step, self._saved_at
        self._next_told = self._step + 1

    def ask(self) -> None:
        """Save at a boundary soon, on every rank; any rank may be asked, in a signal handler too."""
        self._is_asked = True

    def go_on_from(self, step: int) -> None:
        """Hear that a checkpoint of this step was loaded."""
        self._step = self._saved_step = self._told_step = step
        self._next_told = step + 1
        self._saved_at = self._told_at = self._clock()

    def boundary(self) -> None:
        """Hear that a loop is done with a batch."""
        self.is_reached = True
        step = self._num_steps()
        if step == self._step:  # inside of an accumulation window, or nothing has been trained
            return
        self._step = step
        is_due = self._steps is not None and step - self._saved_step >= self._steps
        if step >= self._next_told:
            is_due = self._is_wanted_anywhere(step) or is_due
        if is_due:
            self._saved_step, self._is_asked = step, False
            self._save()
            self._saved_at = self._clock()

    def _is_wanted_anywhere(self, step: int) -> bool:
        """Tell the other ranks whether this one wants a save, and settle at which step to tell again."""
        now = self._clock()
        is_up = self._seconds is not None and now - self._saved_at >= self._seconds
        step_s = (now - self._told_at) / max(step - self._told_step, 1)
        wait_s = _CHECK_S if self._seconds is None else min(_CHECK_S, max(self._saved_at + self._seconds - now, 0.0))
        wait = max(1, min(int(wait_s / step_s) if step_s > 0 else _MAX_STEPS, _MAX_STEPS))
        told = self._comm.all_gather_json([self._is_asked or is_up, wait])
        self._told_step, self._told_at, self._next_told = step, now, step + min(wait for _, wait in told)
        return any(is_wanted for is_wanted, _ in told)
