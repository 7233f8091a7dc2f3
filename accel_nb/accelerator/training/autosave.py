"""Automatic checkpoints: after a number of steps or an interval of time, or on request, between two steps.

A save, or a stop, takes place at a *boundary*: where a loop reads its next batch, so that the previous batch is done,
including its schedulers. All ranks save after the same step. Since ranks have different clocks, and any rank may
receive a request, they exchange a small message: not at each step, but about twice a second and where a save is due.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from accel_nb.errors import CheckpointError
from accel_nb.runtime.distributed.communicator import Communicator

_CHECK_S = 0.5
"""Time between two exchanges of requests."""
_MAX_STEPS_BETWEEN_EXCHANGES = 1000
_EXPECTED_WITHIN_S = 1.0
"""A boundary is expected soon if the last one was reached within this time, or this number of mean steps, before."""
_EXPECTED_WITHIN_STEPS = 3

_Request = Literal[0, 1, 2]
_NOTHING, _SAVE, _STOP = 0, 1, 2


class Autosave:
    """Saves where that is due, at boundaries between steps; every rank must reach the same boundaries.

    ``save`` begins a save in the background. ``is_behind`` returns whether the previous save is still being written and
    will take long: a new one is then postponed, so that the training does not wait for the disk. ``num_steps`` returns
    the number of steps so far; a save is due every ``steps`` steps, or every ``seconds`` seconds. ``on_stop`` is called
    before a stop raises KeyboardInterrupt.
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
        on_stop: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._comm = comm
        self._save = save
        self._num_steps = num_steps
        self._steps = steps
        self._seconds = seconds
        self._is_behind = is_behind
        self._on_stop = on_stop
        self._clock = clock
        self._request: _Request = _NOTHING
        # The steps and times of the last boundary, the last save and the last exchange.
        self._step = num_steps()
        self._reached_at = clock()
        self._step_s = 0.0
        self._saved_step = self._step
        self._saved_at = self._reached_at
        self._due_step = self._due_after(self._step)
        self._exchanged_step, self._exchanged_at = self._step, self._saved_at
        self._next_exchange = self._step + 1
        self.begin_run()

    @property
    def has_interval(self) -> bool:
        """Whether it saves without a request."""
        return self._steps is not None or self._seconds is not None

    def begin_run(self) -> None:
        """Discard the requests and results of the previous run."""
        self._request = _NOTHING
        # Whether a loop has reached a boundary.
        self.has_reached_boundary = False
        # How many saves were postponed until the previous one was written.
        self.num_postponed = 0
        # After which step the run was stopped, and the error if that step was not saved.
        self.stopped_step: int | None = None
        # Whether another rank's request has stopped this one before its own arrived.
        self._has_stopped_early = False
        self.problem: str | None = None

    def request_save(self) -> None:
        """Request a save at one of the next boundaries, on every rank. Any rank may call, even in a signal handler."""
        self._request = max(self._request, _SAVE)

    def request_stop(self) -> bool:
        """Request that every rank saves and stops at a boundary; return False if none is expected soon. Thread-safe."""
        if self._has_stopped_early:
            self._has_stopped_early = False
            return True
        self._request = _STOP
        return self.has_reached_boundary and self._clock() - self._reached_at <= max(
            _EXPECTED_WITHIN_S, _EXPECTED_WITHIN_STEPS * self._step_s
        )

    def resume_from(self, step: int) -> None:
        """Continue counting from a loaded checkpoint's step."""
        self._step = self._saved_step = self._exchanged_step = step
        self._due_step = self._due_after(step)
        self._next_exchange = step + 1
        self._reached_at = self._saved_at = self._exchanged_at = self._clock()

    def on_batch_end(self) -> None:
        """Save if that is due when a loop has finished a batch; raises KeyboardInterrupt on every rank for a stop."""
        self.has_reached_boundary = True
        step = self._num_steps()
        if step == self._step:  # inside of an accumulation window, or nothing has been trained
            return
        now = self._clock()
        self._step_s, self._reached_at = now - self._reached_at, now
        self._step = step
        is_due = self._due_step is not None and step >= self._due_step
        if not is_due and step < self._next_exchange:
            return
        request, is_behind = self._agree(step, now)
        if request == _STOP:
            self._stop(step)
        if not is_due and request == _NOTHING:
            return
        if is_behind:
            self.num_postponed += 1
            self._due_step = self._next_exchange
        else:
            self.save_now(step)

    def save_now(self, step: int) -> None:
        """Begin to save at this boundary; every rank must call."""
        self._request = _NOTHING
        self._saved_step, self._due_step = step, self._due_after(step)
        self._save()
        self._saved_at = self._clock()

    def _stop(self, step: int) -> None:
        self._has_stopped_early = self._request != _STOP
        self.stopped_step, self._request = step, _NOTHING
        if step != self._saved_step:
            try:
                self.save_now(step)
            except CheckpointError as error:
                self.problem = str(error)
        self._on_stop()
        raise KeyboardInterrupt

    def _due_after(self, step: int) -> int | None:
        return None if self._steps is None else step + self._steps

    def _agree(self, step: int, now: float) -> tuple[_Request, bool]:
        """Return the strongest request of all ranks and whether any is behind; set the step of the next exchange."""
        has_elapsed = self._seconds is not None and now - self._saved_at >= self._seconds
        step_s = (now - self._exchanged_at) / max(step - self._exchanged_step, 1)
        wait_s = _CHECK_S if self._seconds is None else min(_CHECK_S, max(self._saved_at + self._seconds - now, 0.0))
        wait_steps = max(
            1, min(int(wait_s / step_s) if step_s > 0 else _MAX_STEPS_BETWEEN_EXCHANGES, _MAX_STEPS_BETWEEN_EXCHANGES)
        )
        own = max(self._request, _SAVE if has_elapsed else _NOTHING)
        messages = self._comm.all_gather_json([own, wait_steps, self._is_behind()])
        self._exchanged_step, self._exchanged_at = step, now
        self._next_exchange = step + min(wait_steps for _, wait_steps, _ in messages)
        return max(request for request, _, _ in messages), any(is_behind for _, _, is_behind in messages)
