"""Coordination of an action that all ranks of a request perform after the same step, without messages between ranks.

Each rank reports how many ends of steps it has counted, and waits at its next one. When all have reported, the kernel
sends the decision to perform the action at the highest count plus one, which no rank can have passed. One proposal is
open at a time.
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
"""How long ranks may take to report; ranks that have reported wait meanwhile."""
RETRY_S = 0.2
"""The delay before a proposal is repeated if a rank reports that it runs no cell: its cell may be about to begin."""
MAX_QUEUED = 8
"""How many requested actions may be queued."""


class ControlAction:
    """An action requested of a running cell; any thread may wait for its outcome."""

    def __init__(
        self, action: dict[str, Any], on_resolved: Callable[[ControlAction], object] = lambda action: None
    ) -> None:
        self.action = action
        self.text = ""
        # The step after which the action was performed, None if it was not, and the rank that reported it.
        self.step: int | None = None
        self.rank = 0
        self._on_resolved = on_resolved
        self._is_resolved = threading.Event()

    def resolve(self, text: str, step: int | None = None, rank: int = 0) -> None:
        """Record the outcome; only the first call counts."""
        if not self._is_resolved.is_set():
            self.text, self.step, self.rank = text, step, rank
            self._is_resolved.set()
            self._on_resolved(self)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the outcome; return whether it is known."""
        return self._is_resolved.wait(timeout_s)


class ActionQueue:
    """The queue of actions for one running request: any thread adds to it, the thread that runs the request removes."""

    def __init__(self) -> None:
        self.num_interrupts = 0
        self._waiting: deque[ControlAction] = deque()
        self._is_closed = False
        self._lock = threading.Lock()

    def add(self, action: ControlAction) -> None:
        """Queue an action; resolve it at once as not done if the queue is full or the request has ended."""
        with self._lock:
            problem = _ENDED if self._is_closed else _TOO_MANY if len(self._waiting) >= MAX_QUEUED else None
            if problem is None:
                self._waiting.append(action)
        if problem is not None:
            action.resolve(problem)

    def interrupt(self) -> None:
        """Interrupt the request, as an interrupt by the user does."""
        with self._lock:
            self.num_interrupts += 1

    def interrupt_once(self) -> None:
        """Interrupt the request if it was not interrupted before; safe in a signal handler."""
        self.num_interrupts = max(self.num_interrupts, 1)

    def pop(self) -> ControlAction | None:
        """Remove and return the next action; None if there is none."""
        with self._lock:
            return self._waiting.popleft() if self._waiting else None

    def close(self) -> None:
        """Resolve the queued actions, and all that are added later, as not done."""
        with self._lock:
            self._is_closed = True
            remaining, self._waiting = list(self._waiting), deque()
        for action in remaining:
            action.resolve(_ENDED)


_ENDED = "not done: the cell has ended"
_STOPPING = "not done: the cell is being stopped"
_TOO_MANY = f"not done: {MAX_QUEUED} others wait for the end of a step"
_NO_STEP = "not done: no step has ended since"


@dataclass(slots=True)
class ControlCoordinator:
    """Coordinates the actions for one request; the pool calls `update` in each iteration of its waiting loop."""

    engine: Engine
    number: int
    queue: ActionQueue
    clock: Callable[[], float] = time.monotonic
    _last_action_id: int = 0
    _proposed: ControlAction | None = None
    _queried_ranks: set[int] = field(default_factory=set)
    _proposed_at: float = 0.0
    _counts: dict[int, int] = field(default_factory=dict)
    _decided: dict[int, tuple[int, ControlAction]] = field(default_factory=dict)
    """The decided actions by their numbers, each with the lowest rank that was queried."""

    def update(self, waiting: set[int]) -> None:
        """Propose the next action to the running ranks, or withdraw one that a rank has not answered in time."""
        now = self.clock()
        if self._queried_ranks:
            missing = self._queried_ranks - set(self._counts)
            if missing and now - self._proposed_at > ANSWER_TIMEOUT_S:
                ranks = ", ".join(map(str, sorted(missing)))
                self._resolve_proposed(f"not done: rank {ranks} did not answer within {ANSWER_TIMEOUT_S:g} s")
                self._send_decision(None)
            return
        if self._proposed is None:
            self._proposed = self.queue.pop()
        elif now - self._proposed_at < RETRY_S:
            return
        if self._proposed is not None and waiting:
            self._last_action_id += 1
            self._queried_ranks, self._counts, self._proposed_at = set(waiting), {}, now
            for rank in self._queried_ranks:
                self.engine.send(
                    rank, ProposeAction(self.number, self._last_action_id, self._proposed.action), urgent=True
                )

    def record_count(self, rank: int, answer: StepCount) -> None:
        """Record how many ends of steps a rank has counted; if a rank runs no cell, the proposal is repeated later."""
        if not self._queried_ranks or self._proposed is None or answer.action_id != self._last_action_id:
            return
        if answer.count is None:
            self._send_decision(None)
            return
        self._counts[rank] = answer.count
        if self._queried_ranks <= set(self._counts):
            self._decided[self._last_action_id] = min(self._queried_ranks), self._proposed
            self._proposed = None
            self._send_decision(max(self._counts.values()) + 1)

    def record_done(self, rank: int, report: ActionDone) -> None:
        """Record the step after which the lowest queried rank performed the action; ignore reports of other ranks."""
        reporter, action = self._decided.get(report.action_id, (None, None))
        if action is not None and rank == reporter:
            del self._decided[report.action_id]
            action.resolve(report.text, report.step, rank)

    def cancel(self) -> None:
        """Withdraw the proposal, so that waiting ranks continue: the request is being stopped."""
        self._resolve_proposed(_STOPPING)
        self._send_decision(None)

    def close(self) -> None:
        """Resolve all open actions as not done: the request has ended."""
        self.queue.close()
        self._resolve_proposed(_ENDED)
        for _, action in self._decided.values():
            action.resolve(_NO_STEP)

    def _resolve_proposed(self, text: str) -> None:
        action, self._proposed = self._proposed, None
        if action is not None:
            action.resolve(text)

    def _send_decision(self, count: int | None) -> None:
        ranks, self._queried_ranks = self._queried_ranks, set()
        for rank in ranks:
            self.engine.send(rank, DecideAction(self.number, self._last_action_id, count), urgent=True)
