"""Requests of a user to a running cell, from its panel or a line magic: validated, rate-limited, forwarded."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from accel_nb.pool.control.coordination import Wish, Wishes
from accel_nb.telemetry.actions import (
    Action,
    Inspect,
    MapMemory,
    SaveNow,
    ScaleRate,
    SetInterval,
    SetRate,
    StopAfterStep,
    read_action,
    to_message,
)
from accel_nb.telemetry.events import Event, Steered

INTERRUPT = "interrupt"
"""The panel's message for an interrupt of the run, which is no `Action`."""
NO_FOLDER = "not saved: the cell was started without --checkpoint DIR"
MAX_PER_SECOND = 10
"""Further messages of a panel within the same second are dropped."""


class Controls:
    """The controls of one run. Thread-safe.

    ``show_message`` shows the outcome of a request to the user; ``record_event`` receives the event of each executed
    action.
    """

    def __init__(self, *, can_save: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.can_save = can_save
        self.wishes = Wishes()
        self.num_refused = 0
        self.say: Callable[[str], object] = lambda text: None
        self.tell: Callable[[Event], object] = lambda event: None
        self._clock = clock
        self._lock = threading.Lock()
        self._second = -1
        self._num_asked = 0

    def take(self, message: object) -> None:
        """Handle a message of a panel. Count and drop one that is no action, out of range, or over the rate limit."""
        try:
            if self._is_over_rate_limit():
                raise ValueError("too many requests at once")
            if isinstance(message, Mapping) and dict(message) == {"kind": INTERRUPT}:
                self.interrupt()
            else:
                self.ask(read_action(message))
        except ValueError as error:
            self.num_refused += 1
            self.say(f"not done: {error}")

    def ask(self, action: Action) -> Wish:
        """Request an action that all ranks execute after the same step. Returns at once."""
        wish = Wish(to_message(action), lambda wish: self._on_settled(action, wish))
        if isinstance(action, SaveNow) and not self.can_save:
            wish.settle(NO_FOLDER)
        else:
            if not isinstance(action, Inspect):
                self.say(f"{_describe_pending(action)} ...")
            self.wishes.ask(wish)
        return wish

    def interrupt(self) -> None:
        """Interrupt the run at any point of its code. A second interrupt kills ranks that have not stopped."""
        self.say("interrupting ...")
        self.wishes.interrupt()

    def _on_settled(self, action: Action, wish: Wish) -> None:
        if isinstance(action, Inspect):
            return
        self.say(outcome(action, wish))
        if wish.step is not None and not isinstance(action, MapMemory):  # a memory map does not change the training
            self.tell(Steered(wish.rank, wish.step, time.time(), wish.text))

    def _is_over_rate_limit(self) -> bool:
        with self._lock:
            second = int(self._clock())
            self._num_asked = self._num_asked + 1 if second == self._second else 1
            self._second = second
            return self._num_asked > MAX_PER_SECOND


def outcome(action: Action, wish: Wish) -> str:
    """Return the outcome of a request as text, with the step unless the text already has it."""
    names_step = isinstance(action, StopAfterStep | SaveNow | Inspect)
    return wish.text if wish.step is None or names_step else f"{wish.text}, after step {wish.step:,}"


def _describe_pending(action: Action) -> str:
    """Return a text for an action that is not executed yet."""
    if isinstance(action, StopAfterStep):
        return "stopping after this step"
    if isinstance(action, SaveNow):
        return "saving after this step"
    if isinstance(action, SetInterval):
        return f"reporting every {action.steps:,} steps from the next one on"
    if isinstance(action, MapMemory):
        return "mapping the memory after this step"
    words: dict[type, Callable[[Any], str]] = {
        ScaleRate: lambda asked: f"learning rate times {asked.factor:g}",
        SetRate: lambda asked: f"learning rate {asked.value:g}",
    }
    return f"{words[type(action)](action)} after this step"
