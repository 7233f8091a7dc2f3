"""Requests of a user to a running cell, from its panel or a line magic: validated, rate-limited, forwarded."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from accel_nb.pool.control.coordination import ActionQueue, ControlAction
from accel_nb.telemetry.actions import (
    IS_BEING_SAVED,
    Action,
    Inspect,
    SaveNow,
    ScaleLearningRate,
    SetLearningRate,
    SetReportInterval,
    StopAfterStep,
    TakeMemorySnapshot,
    read_action,
    to_message,
)
from accel_nb.telemetry.events import ControlApplied, Event

INTERRUPT = "interrupt"
"""The panel's message that interrupts the run; it is not an `Action`."""
NO_CHECKPOINT_DIR = "not saved: the cell was started without --checkpoint DIR"
MAX_PER_SECOND = 10
"""Further messages of a panel within the same second are dropped."""


class RunControls:
    """The controls of one run. Thread-safe.

    ``queue`` has the requested actions until they are executed, and counts interrupts.
    ``show_message`` shows the outcome of a request to the user; its second argument is whether the outcome is final.
    ``record_event`` receives the event of each executed action.
    """

    def __init__(self, *, can_save: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.can_save = can_save
        self.queue = ActionQueue()
        self.num_rejected = 0
        self.show_message: Callable[[str, bool], object] = lambda text, is_final: None
        self.record_event: Callable[[Event], object] = lambda event: None
        self._clock = clock
        self._lock = threading.Lock()
        self._second = -1
        self._num_in_second = 0

    def handle_message(self, message: object) -> None:
        """Handle a message of a panel; count and drop wrong actions and those over the rate limit."""
        try:
            if self._is_over_rate_limit():
                raise ValueError("too many requests at once")
            if isinstance(message, Mapping) and dict(message) == {"kind": INTERRUPT}:
                self.interrupt()
            else:
                self.request(read_action(message))
        except ValueError as error:
            self.num_rejected += 1
            self.show_message(f"not done: {error}", True)

    def request(self, action: Action) -> ControlAction:
        """Request an action that all ranks execute after the same step. Returns at once."""
        request = ControlAction(to_message(action), lambda request: self._on_done(action, request))
        if isinstance(action, SaveNow) and not self.can_save:
            request.resolve(NO_CHECKPOINT_DIR)
        else:
            if not isinstance(action, Inspect):
                self.show_message(f"{_describe_pending(action)} ...", False)
            self.queue.add(request)
        return request

    def interrupt(self) -> None:
        """Interrupt the run at any point of its code. A second one kills ranks that it has not reached."""
        self.show_message("interrupting ...", False)
        self.queue.interrupt()

    def _on_done(self, action: Action, request: ControlAction) -> None:
        if isinstance(action, Inspect):
            return
        # A save continues after the step: its outcome is reported by an event when it has ended.
        is_saving = isinstance(action, SaveNow | StopAfterStep) and request.text.endswith(IS_BEING_SAVED)
        self.show_message(describe_outcome(action, request), not is_saving)
        # A memory snapshot does not change the training.
        if request.step is not None and not isinstance(action, TakeMemorySnapshot):
            self.record_event(ControlApplied(request.rank, request.step, time.time(), request.text))

    def _is_over_rate_limit(self) -> bool:
        with self._lock:
            second = int(self._clock())
            self._num_in_second = self._num_in_second + 1 if second == self._second else 1
            self._second = second
            return self._num_in_second > MAX_PER_SECOND


def describe_outcome(action: Action, request: ControlAction) -> str:
    """Return the outcome of a request as text, with the step unless the text already has it."""
    names_step = isinstance(action, StopAfterStep | SaveNow | Inspect)
    return request.text if request.step is None or names_step else f"{request.text}, after step {request.step:,}"


def _describe_pending(action: Action) -> str:
    """Return a text for an action that is not executed yet."""
    if isinstance(action, StopAfterStep):
        return "stopping after this step"
    if isinstance(action, SaveNow):
        return "saving after this step"
    if isinstance(action, SetReportInterval):
        return f"reporting every {action.steps:,} steps from the next one on"
    if isinstance(action, TakeMemorySnapshot):
        return "taking a memory snapshot after this step"
    words: dict[type, Callable[[Any], str]] = {
        ScaleLearningRate: lambda action: f"learning rate times {action.factor:g}",
        SetLearningRate: lambda action: f"learning rate {action.value:g}",
    }
    return f"{words[type(action)](action)} after this step"
