"""Makes all ranks of a running request perform an action after the same step, without messages between ranks.

Each rank reports how many ends of steps it has counted, and holds at its next one. When all have reported, they get
the decision to act at the count after the highest, which none of them can have passed. One request for an action is
coordinated at a time.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from accel_nb.pool.engine import Engine
from accel_nb.pool.messages import ActionDone, DecideAction, ProposeAction, StepCount

ANSWER_TIMEOUT_S = 2.0
"""How long ranks may take to report; the others hold meanwhile."""
RETRY_S = 0.2
"""How long after a rank reported that it runs no cell the proposal is repeated: its cell may be about to begin."""
MAX_QUEUED = 8
"""How many requested actions may be queued."""


class ControlRequest:
    """An action requested of a running cell; any thread may wait for its outcome."""

    def __init__(
        self, action: dict[str, Any], on_settled: Callable[[ControlRequest], object] = lambda requested: None
    ) -> None:
        self.action = action
        self.text = ""
        # The step after which it was done, None if it was not, and the rank that reported it.
        self.step: int | None = None
        self.rank = 0
        self._on_settled = on_settled
        self._is_settled = threading.Event()

    def resolve(self, text: str, step: int | None = None, rank: int = 0) -> None:
        """Record the outcome; only the first call counts."""
        if not self._is_settled.is_set():
            self.text, self.step, self.rank = text, step, rank
            self._is_settled.set()
            self._on_settled(self)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the outcome; return whether it is known."""
        return self._is_settled.wait(timeout_s)


class ControlQueue:
    """The queue of actions requested of one running request: any thread adds, the thread that runs it takes."""

    def __init__(self) -> None:
        self.num_interrupts = 0
        self._waiting: deque[ControlRequest] = deque()
        self._is_closed = False
        self._lock = threading.Lock()

    def add(self, requested: ControlRequest) -> None:
        """Queue an action; it is settled at once, as not done, if the queue is full or the request has ended."""
        with self._lock:
            problem = _ENDED if self._is_closed else _TOO_MANY if len(self._waiting) >= MAX_QUEUED else None
            if problem is None:
                self._waiting.append(requested)
        if problem is not None:
            requested.resolve(problem)

    def interrupt(self) -> None:
        """Interrupt the request, as the user's interrupt does."""
        with self._lock:
            self.num_interrupts += 1

    def interrupt_once(self) -> None:
        """Interrupt the request unless that has happened; safe in a signal handler."""
        self.num_interrupts = max(self.num_interrupts, 1)

    def pop(self) -> ControlRequest | None:
        """Return the next action, if there is one."""
        with self._lock:
            return self._waiting.popleft() if self._waiting else None

    def close(self) -> None:
        """Refuse further actions and settle those that are queued."""
        with self._lock:
            self._is_closed = True
            left, self._waiting = list(self._waiting), deque()
        for requested in left:
            requested.resolve(_ENDED)


_ENDED = "not done: the cell has ended"
_STOPPING = "not done: the cell is being stopped"
_TOO_MANY = f"not done: {MAX_QUEUED} others wait for the end of a step"
_NO_STEP = "not done: no step has ended since"


@dataclass(slots=True)
class ControlCoordinator:
    """Coordinates the actions requested of one request; `turn` is called in each turn of the waiting loop."""

    engine: Engine
    number: int
    queue: ControlQueue
    clock: Callable[[], float] = time.monotonic
    _numbers: int = 0
    _proposed: ControlRequest | None = None
    _asked: set[int] = field(default_factory=set)
    _asked_at: float = 0.0
    _counts: dict[int, int] = field(default_factory=dict)
    _agreed: dict[int, tuple[int, ControlRequest]] = field(default_factory=dict)

    def update(self, waiting: set[int]) -> None:
        """Propose the next action to the ranks that run, or withdraw one that not all have answered in time."""
        now = self.clock()
        if self._asked:
            missing = self._asked - set(self._counts)
            if missing and now - self._asked_at > ANSWER_TIMEOUT_S:
                ranks = ", ".join(map(str, sorted(missing)))
                self._settle(f"not done: rank {ranks} did not answer within {ANSWER_TIMEOUT_S:g} s")
                self._decide(None)
            return
        if self._proposed is None:
            self._proposed = self.queue.pop()
        elif now - self._asked_at < RETRY_S:
            return
        if self._proposed is not None and waiting:
            self._numbers += 1
            self._asked, self._counts, self._asked_at = set(waiting), {}, now
            for rank in self._asked:
                self.engine.send(rank, ProposeAction(self.number, self._numbers, self._proposed.action), urgent=True)

    def record_count(self, rank: int, answer: StepCount) -> None:
        """Record how many ends of steps a rank has counted; a rank that runs no cell gets the proposal again later."""
        if not self._asked or self._proposed is None or answer.action_id != self._numbers:
            return
        if answer.count is None:
            self._decide(None)
            return
        self._counts[rank] = answer.count
        if self._asked <= set(self._counts):
            self._agreed[self._numbers] = min(self._asked), self._proposed
            self._proposed = None
            self._decide(max(self._counts.values()) + 1)

    def record_done(self, rank: int, report: ActionDone) -> None:
        """Record after which step a rank performed the action."""
        reporter, requested = self._agreed.get(report.action_id, (None, None))
        if requested is not None and rank == reporter:
            del self._agreed[report.action_id]
            requested.resolve(report.text, report.step, rank)

    def cancel(self) -> None:
        """Release all ranks that hold: the request is being stopped."""
        self._settle(_STOPPING)
        self._decide(None)

    def close(self) -> None:
        """Settle what is open, as not done: the request has ended."""
        self.queue.close()
        self._settle(_ENDED)
        for _, requested in self._agreed.values():
            requested.resolve(_NO_STEP)

    def _settle(self, text: str) -> None:
        requested, self._proposed = self._proposed, None
        if requested is not None:
            requested.resolve(text)

    def _decide(self, at: int | None) -> None:
        asked, self._asked = self._asked, set()
        for rank in asked:
            self.engine.send(rank, DecideAction(self.number, self._numbers, at), urgent=True)
