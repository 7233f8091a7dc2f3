"""A pool: persistent workers, and the loop that waits for all of them or for the first failure."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from accel_nb.errors import PoolError
from accel_nb.pool.control.coordination import Steersman, Wishes
from accel_nb.pool.control.hang_detection import HangDoctor
from accel_nb.pool.control.stop_escalation import Answer, Ladder, Reason
from accel_nb.pool.engine import Arrival, Arrived, Ended, Engine, Measured, Printed, Seen, WorkerSpec
from accel_nb.pool.messages import (
    ActionDone,
    FinishAnswer,
    Note,
    PositionReport,
    Reply,
    Request,
    StepCount,
    Stopped,
    WorkerReady,
)
from accel_nb.pool.payload import NO_PAYLOADS, PayloadFactory, Payloads, close_all
from accel_nb.pool.pool_state import State, move
from accel_nb.telemetry.events import Event

POLL_S = 0.05
HANG = "hang"
"""Topic of notes about a rank that others wait for; the body has a ``line``."""
START_PATIENCE_S = 120.0
GONE_PATIENCE_S = 1.0
"""How long to wait for the exit notice of a rank to which a request could not be sent."""
MAX_RESTARTS = 2
"""How often in a row workers may die while they start before the pool fails."""


class Listener(Protocol):
    """Receives what workers report while a request runs; called in the thread that runs it."""

    def printed(self, rank: int, stream: str, data: bytes) -> None:
        """Handle bytes that a rank wrote."""
        ...

    def noted(self, rank: int, topic: str, body: dict[str, Any]) -> None:
        """Handle a note."""
        ...

    def measured(self, events: Sequence[Event]) -> None:
        """Handle measurements."""
        ...

    def answered(self, answer: Answer) -> None:
        """Handle the end of the request on one rank."""
        ...

    def tick(self) -> None:
        """Redraw if it is due; called at least every 50 ms."""
        ...


class Pool:
    """Runs requests on workers, and replaces those that die."""

    def __init__(self, engine: Engine, specs: Sequence[WorkerSpec]) -> None:
        self._engine = engine
        self._specs = tuple(specs)
        self._state: State = "starting"
        self._number = 0
        self._starting: set[int] = set()
        self._reopening: set[int] = set()
        self._ending: set[int] = set()
        self._num_restarts = 0
        engine.start(specs)
        self._starting = set(range(self.size))

    @property
    def size(self) -> int:
        """The number of workers."""
        return len(self._specs)

    @property
    def specs(self) -> tuple[WorkerSpec, ...]:
        """The device and thread count of each worker."""
        return self._specs

    @property
    def payloads(self) -> PayloadFactory:
        """The factory of payloads that requests can carry."""
        return self._engine.payloads

    @property
    def state(self) -> State:
        """The state of the pool."""
        return self._state

    def wait_ready(
        self, num_interrupts: Callable[[], int] = lambda: 0, *, patience_s: float = START_PATIENCE_S
    ) -> None:
        """Wait until every worker has reported that it is ready.

        Raise PoolError when one cannot start, and KeyboardInterrupt when ``num_interrupts()``, the number of the user's
        interrupts so far, increases; the pool has failed then.
        """
        deadline = time.monotonic() + patience_s
        output: list[bytes] = []
        while self._starting or self._reopening or self._ending:
            try:
                for arrival in self._engine.poll(POLL_S):
                    self._note_start(arrival, output)
            except PoolError:
                if self._state != "failed":
                    self._state = move(self._state, "failed")
                raise
            if num_interrupts():
                self._state = move(self._state, "failed")
                raise KeyboardInterrupt
            if time.monotonic() > deadline:
                self._fail(f"ranks {sorted(self._starting | self._reopening)} did not become ready", output)
        self._num_restarts = 0
        if self._state == "starting":
            self._state = move(self._state, "ready")

    def run(
        self,
        task: str,
        bodies: Mapping[int, dict[str, Any]],
        listener: Listener,
        *,
        payloads: Payloads = NO_PAYLOADS,
        num_interrupts: Callable[[], int] = lambda: 0,
        timeout_s: float | None = None,
        finishes: bool = False,
        wishes: Wishes | None = None,
        poll_s: float = POLL_S,
    ) -> tuple[list[Answer], Reason | None]:
        """Run a task on the ranks that are keys of ``bodies`` and wait until it has ended on each.

        When a rank raises or dies, or ``num_interrupts()`` (the number of the user's interrupts so far) increases, the
        others are stopped, by SIGKILL in the end: the call never waits for a rank that cannot finish. With
        ``finishes`` ranks may first end their step and save. Actions from ``wishes`` run after the same step of all
        ranks. ``payloads`` go to each rank and stay the caller's.

        Returns the answers in the order of their arrival, and why the request was stopped early, or None.
        """
        self.wait_ready(num_interrupts)
        self._state = move(self._state, "busy")
        self._number += 1
        ladder = Ladder(self._engine, self._number, self.size, finishes)
        doctor = HangDoctor(
            self._engine, self._number, self.size, lambda rank, line: listener.noted(rank, HANG, {"line": line})
        )
        steersman = Steersman(self._engine, self._number, Wishes() if wishes is None else wishes)
        answers: list[Answer] = []
        waiting = set(bodies)
        unsent = {
            rank
            for rank, body in bodies.items()
            if not self._engine.send(rank, Request(self._number, task, body), payloads)
        }
        started = time.monotonic()
        deadline = None if timeout_s is None else started + timeout_s
        while waiting:
            arrivals = self._engine.poll(poll_s)
            if unsent and time.monotonic() - started > GONE_PATIENCE_S:
                # The engine reports a rank that is gone by `Ended`, unless it did so before this request.
                arrivals += [Ended(rank, -signal.SIGKILL) for rank in unsent & waiting]
                unsent = set()
            for arrival in arrivals:
                if isinstance(arrival, Seen):
                    doctor.seen(arrival)
                    continue
                if isinstance(arrival, Arrived) and _dispatch(ladder, doctor, steersman, arrival, self._number):
                    continue
                doctor.heard()
                answer = self._take(arrival, listener, waiting, ladder.killed)
                if answer is not None:
                    answers.append(answer)
                    if answer.outcome == "died":
                        ladder.died()
                    elif answer.outcome == "raised":
                        ladder.failed(is_torn=bool(answer.body.get("torn")))
                    listener.answered(answer)
            if waiting:
                listener.tick()
                if ladder.reason is None:
                    doctor.turn(waiting)
                    steersman.turn(waiting)
                    if doctor.is_stuck:
                        ladder.stuck()
                else:
                    steersman.give_up()
                ladder.climb(waiting, num_interrupts(), timed_out=deadline is not None and time.monotonic() > deadline)
        steersman.close()
        self._repair(
            {answer.rank for answer in answers if answer.outcome == "died"}, left_the_group=ladder.left_the_group
        )
        return answers, ladder.reason

    def look_around(self) -> set[int]:
        """Replace ranks that ended since the last request; return them, or all ranks if the pool has failed."""
        everyone = set(range(self.size))
        if self._state == "failed" or not self._await_replaced():
            return everyone
        dead = {arrival.rank for arrival in self._engine.poll(0) if isinstance(arrival, Ended)}
        if dead:
            self._repair(dead, left_the_group=False)
        return everyone if self._state == "failed" or not self._await_replaced() else dead

    def _await_replaced(self) -> bool:
        """Wait for ranks that are being replaced; return False when that fails."""
        try:
            self.wait_ready()
        except PoolError:
            return False
        return True

    def retire(self) -> None:
        """Stop using the engine, which another pool may use then."""
        self._state = move(self._state, "closed")

    def close(self) -> None:
        """End the workers and the engine; a second call does nothing."""
        self.retire()
        self._engine.stop()

    def _take(self, arrival: Arrival, listener: Listener, waiting: set[int], killed: Collection[int]) -> Answer | None:
        if isinstance(arrival, Printed):
            listener.printed(arrival.rank, arrival.stream, arrival.data)
        elif isinstance(arrival, Measured):
            listener.measured(arrival.events)
        elif isinstance(arrival, Ended):
            waiting.discard(arrival.rank)
            killed_by_us = arrival.rank in killed
            death = {"code": arrival.code, "killed": killed_by_us, "stack": arrival.stack}
            return Answer(arrival.rank, "died", {**death, "killed_for": arrival.killed_for})
        elif isinstance(arrival, Arrived):
            record = arrival.record
            if isinstance(record, Note):
                listener.noted(arrival.rank, record.topic, record.body)
            elif isinstance(record, Reply) and record.number == self._number:
                waiting.discard(arrival.rank)
                return Answer(arrival.rank, record.outcome, record.body, arrival.payloads)
            close_all(arrival.payloads.values())
        return None

    def _repair(self, dead: Collection[int], *, left_the_group: bool) -> None:
        """Replace dead ranks and make every rank open a new process group; the next request waits for that."""
        if not dead and not left_the_group:
            self._state = move(self._state, "ready")
            return
        self._state = move(self._state, "starting")
        try:
            payloads = self._engine.replace(sorted(dead))
        except PoolError:
            self._state = move(self._state, "failed")
            return
        self._number += 1
        self._starting = set(dead)
        self._reopening = set(range(self.size)) - set(dead)
        for rank in sorted(self._reopening):
            self._engine.send(rank, Request(self._number, "reopen"), payloads)

    def _note_start(self, arrival: Arrival, output: list[bytes]) -> None:
        if isinstance(arrival, Printed):
            output.append(arrival.data)
        elif isinstance(arrival, Ended):
            if arrival.reason:
                self._fail(f"rank {arrival.rank} {arrival.reason}", output)
            self._note_end_while_starting(arrival.rank, output)
        elif self._ending:
            pass  # reports of ranks that are being ended do not count
        elif isinstance(arrival, Arrived) and isinstance(arrival.record, WorkerReady):
            self._starting.discard(arrival.rank)
        elif isinstance(arrival, Arrived) and isinstance(arrival.record, Reply):
            if arrival.record.number != self._number:
                return
            if arrival.record.outcome != "done":
                self._fail(f"rank {arrival.rank} could not rejoin: {arrival.record.body}", output)
            self._reopening.discard(arrival.rank)
        if isinstance(arrival, Arrived):
            close_all(arrival.payloads.values())

    def _note_end_while_starting(self, rank: int, output: list[bytes]) -> None:
        """End all ranks and start all again: the others would wait for the one that ended."""
        if not self._ending:
            self._num_restarts += 1
            if self._num_restarts > MAX_RESTARTS:
                self._fail(f"rank {rank} ended while starting, {self._num_restarts} times in a row", output)
            self._ending = set(range(self.size))
            self._starting, self._reopening = set(), set()
            for other in self._ending - {rank}:
                self._engine.kill(other)
        self._ending.discard(rank)
        if not self._ending:
            self._engine.replace(range(self.size))
            self._starting = set(range(self.size))

    def _fail(self, what: str, output: list[bytes]) -> None:
        self._state = move(self._state, "failed")
        tail = b"".join(output)[-4000:].decode(errors="replace")
        raise PoolError(f"{what}; run `%accelerate restart` to start over. Its last output:\n{tail}")


def _dispatch(ladder: Ladder, doctor: HangDoctor, steersman: Steersman, arrival: Arrived, number: int) -> bool:
    """Pass a record on to the part of the waiting loop that it is for; return whether it was for one of them."""
    record = arrival.record
    if not isinstance(record, Stopped | FinishAnswer | PositionReport | StepCount | ActionDone):
        return False
    if record.number != number:
        return True
    if isinstance(record, Stopped):
        ladder.stopped(arrival.rank)
    elif isinstance(record, StepCount):
        steersman.answered(arrival.rank, record)
    elif isinstance(record, ActionDone):
        steersman.done(arrival.rank, record)
    elif isinstance(record, FinishAnswer):
        ladder.answered_finish(arrival.rank, record.will)
    else:
        doctor.answered(arrival.rank, record.position)
    return True
