"""Saving by itself: each time so many steps or so much time has passed, or somebody asks, between two steps.

A loop asks for its next batch when it is done with the one before, schedulers and all: that is where a save is made,
and where a run that is to stop does so, on all ranks after the same step. Ranks have clocks of their own, so whether
time is up, or a rank was asked, they settle among each other: with one small message about twice a second, and one
where a save is due, not at each step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from accel_nb.errors import CheckpointError
from accel_nb.runtime.distributed.communicator import Communicator

_CHECK_S = 0.5
_MAX_STEPS = 1000
_NEAR_S = 1.0
_NEAR_STEPS = 3

_Wish = Literal[0, 1, 2]
_NOTHING, _SAVE, _STOP = 0, 1, 2


class Autosave:
    """Decides at each boundary between steps whether to save; every rank must come to the same boundaries.

    ``save`` begins a save in the background. ``is_behind`` says whether the one before is still being written, and
    slowly: a new one is then put off, so that the training does not wait for the disk.
    """

    def __init__(
        self,
        comm: Communicator,
        save: Callable[[], object],
        num_steps: Callable[[], int],
        *,
        steps: int | None = None,
        seconds: float | None = None,
        is_behind: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._comm = comm
        self._save = save
        self._num_steps = num_steps
        self._steps = steps
        self._seconds = seconds
        self._is_behind = is_behind
        self._clock = clock
        self._wish: _Wish = _NOTHING
        # Where the last boundary, the last save and the last message were.
        self._step = num_steps()
        self._came_at = clock()
        self._pace_s = 0.0
        self._saved_step = self._step
        self._saved_at = self._came_at
        self._due_step = self._due_after(self._step)
        self._told_step, self._told_at = self._step, self._saved_at
        self._next_told = self._step + 1
        self.begin_run()

    @property
    def has_interval(self) -> bool:
        """Whether it saves unasked."""
        return self._steps is not None or self._seconds is not None

    def begin_run(self) -> None:
        """Forget what the run before was told and has come to."""
        self._wish = _NOTHING
        # A loop has come to a boundary.
        self.is_reached = False
        # How many saves were put off until the one before was written.
        self.num_late = 0
        # After which step the run was stopped, and why that step was not saved.
        self.stopped_step: int | None = None
        self.problem: str | None = None

    def ask(self) -> None:
        """Save at a boundary soon, on every rank; any rank may be asked, in a signal handler too."""
        self._wish = max(self._wish, _SAVE)

    def ask_to_stop(self) -> bool:
        """Save at a boundary soon and stop there, on every rank; False if none is near. Any thread may ask."""
        self._wish = _STOP
        return self.is_reached and self._clock() - self._came_at <= max(_NEAR_S, _NEAR_STEPS * self._pace_s)

    def go_on_from(self, step: int) -> None:
        """Hear that a checkpoint of this step was loaded."""
        self._step = self._saved_step = self._told_step = step
        self._due_step = self._due_after(step)
        self._next_told = step + 1
        self._came_at = self._saved_at = self._told_at = self._clock()

    def boundary(self) -> None:
        """Hear that a loop is done with a batch; raises KeyboardInterrupt, on every rank, where the run is to stop."""
        self.is_reached = True
        step = self._num_steps()
        if step == self._step:  # inside of an accumulation window, or nothing has been trained
            return
        now = self._clock()
        self._pace_s, self._came_at = now - self._came_at, now
        self._step = step
        is_due = self._due_step is not None and step >= self._due_step
        if not is_due and step < self._next_told:
            return
        wish, is_behind = self._settle(step, now)
        if wish == _STOP:
            self._stop(step)
        if not is_due and wish == _NOTHING:
            return
        if is_behind:
            self.num_late += 1
            self._due_step = self._next_told
        else:
            self.save_now(step)

    def save_now(self, step: int) -> None:
        """Begin to save at this boundary; every rank must call."""
        self._wish = _NOTHING
        self._saved_step, self._due_step = step, self._due_after(step)
        self._save()
        self._saved_at = self._clock()

    def _stop(self, step: int) -> None:
        self.stopped_step = step
        if step != self._saved_step:
            try:
                self.save_now(step)
            except CheckpointError as error:
                self.problem = str(error)
        raise KeyboardInterrupt

    def _due_after(self, step: int) -> int | None:
        return None if self._steps is None else step + self._steps

    def _settle(self, step: int, now: float) -> tuple[_Wish, bool]:
        """Return what any rank wants and whether any is behind, and settle at which step to tell again."""
        is_up = self._seconds is not None and now - self._saved_at >= self._seconds
        step_s = (now - self._told_at) / max(step - self._told_step, 1)
        wait_s = _CHECK_S if self._seconds is None else min(_CHECK_S, max(self._saved_at + self._seconds - now, 0.0))
        wait = max(1, min(int(wait_s / step_s) if step_s > 0 else _MAX_STEPS, _MAX_STEPS))
        told = self._comm.all_gather_json([max(self._wish, _SAVE if is_up else _NOTHING), wait, self._is_behind()])
        self._told_step, self._told_at, self._next_told = step, now, step + min(wait for _, wait, _ in told)
        return max(wish for wish, _, _ in told), any(is_behind for _, _, is_behind in told)
