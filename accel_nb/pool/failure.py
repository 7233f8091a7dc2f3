"""What stops a request early, and how far a pool goes to stop it: ask, cut, kill.

The ladder has two rungs. First every rank that still runs gets a KeyboardInterrupt, and the connections of its
process group are cut so that a collective cannot hold it; Python state survives. A rank that has not answered after
the grace time, or when the user interrupts again, is killed and replaced; its state is lost.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from accel_nb.pool.engine import Engine
from accel_nb.pool.messages import Interrupt

GRACE_S = 2.0
PEER_PATIENCE_S = 0.2
"""How long the other ranks may take to fail by themselves after one rank raised: often all raise the same."""

Outcome = Literal["done", "raised", "interrupted", "died"]
Reason = Literal["interrupt", "failure", "death", "timeout"]


@dataclass(frozen=True, slots=True)
class Answer:
    """How a request ended on one rank; descriptors belong to the receiver."""

    rank: int
    outcome: Outcome
    body: dict[str, Any]
    descriptors: tuple[int, ...] = ()


@dataclass(slots=True)
class Ladder:
    """Decides, at each turn of the waiting loop, whether to ask or to kill the ranks that still run."""

    engine: Engine
    number: int
    can_cut: bool
    clock: Callable[[], float] = time.monotonic
    reason: Reason | None = None
    has_cut: bool = False
    killed: set[int] = field(default_factory=set)
    _stopped: set[int] = field(default_factory=set)
    _asked_at: float | None = None
    _failed_at: float | None = None
    _presses_seen: int = 0

    def failed(self) -> None:
        """Note that a rank raised: the others get a moment, then are asked to stop."""
        if self._failed_at is None:
            self._failed_at = self.clock()

    def died(self) -> None:
        """Note that a rank ended: nothing that waits for it can finish."""
        self._failed_at = self.clock() - PEER_PATIENCE_S
        self.reason = self.reason or "death"

    def stopped(self, rank: int) -> None:
        """Note that a rank's user code has ended; it packs what was trained, which may take longer than the grace."""
        self._stopped.add(rank)

    def climb(self, waiting: set[int], presses: int, *, timed_out: bool = False) -> None:
        """Take the next step, if one is due."""
        new_press = presses > self._presses_seen
        self._presses_seen = presses
        now = self.clock()
        if self._asked_at is None:
            peers_late = self._failed_at is not None and now - self._failed_at >= PEER_PATIENCE_S
            if new_press or timed_out or peers_late:
                self.reason = self.reason or ("interrupt" if new_press else "timeout" if timed_out else "failure")
                self._ask(waiting)
        elif new_press or now - self._asked_at > GRACE_S:
            for rank in waiting - self.killed - (set() if new_press else self._stopped):
                self.engine.kill(rank)
                self.killed.add(rank)

    def _ask(self, waiting: set[int]) -> None:
        self._asked_at = self.clock()
        for rank in waiting:
            self.engine.send(rank, Interrupt(self.number, cut=self.can_cut), urgent=True)
        self.has_cut = self.can_cut


def describe_exit(code: int) -> str:
    """Say in words how a process ended: by which signal, or with which exit code."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (often the system running out of memory)" if -code == signal.SIGKILL else ""
    return f"was ended by {name}{hint}"
