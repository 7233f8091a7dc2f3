"""What a user may ask of one run while it goes on, from its panel or by a line magic: checked, counted, passed on."""

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
"""What a panel may ask for beside the actions: the run's interrupt, as the kernel's own."""
NO_FOLDER = "not saved: the cell was started without --checkpoint DIR"
MAX_PER_SECOND = 10
"""A panel that asks more often is not listened to."""


class Controls:
    """The controls of one run; any thread may use them.

    ``say`` shows what became of something, ``tell`` takes the event of what was done.
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
        """Take what a panel sends; what is no action, out of range, or one of a flood is counted and dropped."""
        try:
            if self._is_flooded():
                raise ValueError("too many at once")
            if isinstance(message, Mapping) and dict(message) == {"kind": INTERRUPT}:
                self.interrupt()
            else:
                self.ask(read_action(message))
        except ValueError as error:
            self.num_refused += 1
            self.say(f"not done: {error}")

    def ask(self, action: Action) -> Wish:
        """Have every rank do something after the same step; returns at once."""
        wish = Wish(to_message(action), lambda wish: self._settled(action, wish))
        if isinstance(action, SaveNow) and not self.can_save:
            wish.settle(NO_FOLDER)
        else:
            if not isinstance(action, Inspect):
                self.say(f"{_asked(action)} ...")
            self.wishes.ask(wish)
        return wish

    def interrupt(self) -> None:
        """Interrupt the run, wherever its ranks are; once more, and those that do not stop are ended."""
        self.say("interrupting ...")
        self.wishes.interrupt()

    def _settled(self, action: Action, wish: Wish) -> None:
        if isinstance(action, Inspect):
            return
        self.say(outcome(action, wish))
        if wish.step is not None and not isinstance(action, MapMemory):  # which changes nothing
            self.tell(Steered(wish.rank, wish.step, time.time(), wish.text))

    def _is_flooded(self) -> bool:
        with self._lock:
            second = int(self._clock())
            self._num_asked = self._num_asked + 1 if second == self._second else 1
            self._second = second
            return self._num_asked > MAX_PER_SECOND


def outcome(action: Action, wish: Wish) -> str:
    """Say what became of a wish, and after which step where the text does not."""
    names_step = isinstance(action, StopAfterStep | SaveNow | Inspect)
    return wish.text if wish.step is None or names_step else f"{wish.text}, after step {wish.step:,}"


def _asked(action: Action) -> str:
    """Say what was asked for, while it is not done."""
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
