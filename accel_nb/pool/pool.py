"""The pool of persistent workers, and the loop that waits until a request has ended on all of them."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from accel_nb.errors import PoolError
from accel_nb.pool.control.coordination import ActionQueue, ControlCoordinator
from accel_nb.pool.control.hang_detection import HangDetector
from accel_nb.pool.control.stop_escalation import RankResult, Reason, StopEscalation, WorkerDeath
from accel_nb.pool.engine import (
    Arrival,
    Engine,
    EventsArrived,
    NodeLost,
    ObservedState,
    OutputArrived,
    RecordArrived,
    WorkerEnded,
    WorkerSpec,
)
from accel_nb.pool.messages import (
    ActionDone,
    FinishAnswer,
    InterruptReport,
    LocationReport,
    RankMessage,
    Reply,
    StepCount,
    Stopped,
    TaskRequest,
    WorkerReady,
)
from accel_nb.pool.payload import NO_PAYLOADS, PayloadFactory, Payloads, close_all
from accel_nb.pool.pool_state import PoolState, transition
from accel_nb.telemetry.events import Event

POLL_S = 0.05
HANG = "hang"
"""Topic of messages about a rank that others wait for; the body has the text as ``line``."""
START_TIMEOUT_S = 120.0
EXIT_NOTICE_TIMEOUT_S = 1.0
"""How long to wait for the exit notice of a rank to which a request could not be sent."""
MAX_RESTARTS = 2
"""The pool fails after more successive restarts that were caused by a worker that died while starting."""


class RequestListener(Protocol):
    """Callbacks for the reports of workers while a request runs; called in the thread that runs it."""

    def on_output(self, rank: int, stream: str, data: bytes) -> None:
        """Handle bytes that a rank wrote to its standard output or error stream."""
        ...

    def on_message(self, rank: int, topic: str, body: dict[str, Any]) -> None:
        """Handle a message of a rank."""
        ...

    def on_events(self, events: Sequence[Event]) -> None:
        """Handle measurements."""
        ...

    def on_result(self, answer: RankResult) -> None:
        """Handle the end of the request on one rank."""
        ...

    def tick(self) -> None:
        """Refresh the display if it is due; called at least every 50 ms."""
        ...


class Pool:
    """Runs requests on workers, and replaces those that die."""

    def __init__(self, engine: Engine, specs: Sequence[WorkerSpec]) -> None:
        self._engine = engine
        self._specs = tuple(specs)
        self._state: PoolState = "starting"
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
    def state(self) -> PoolState:
        """The state of the pool."""
        return self._state

    def wait_ready(
        self,
        num_interrupts: Callable[[], int] = lambda: 0,
        *,
        timeout_s: float = START_TIMEOUT_S,
        on_wait: Callable[[], object] = lambda: None,
    ) -> None:
        """Wait until every worker has reported that it is ready; call ``on_wait`` in each iteration of the wait.

        Raise PoolError if a worker cannot start, and KeyboardInterrupt if ``num_interrupts()``, the number of the
        user's interrupts so far, is not 0; the pool has failed in both cases.
        """
        deadline = time.monotonic() + timeout_s
        output: list[bytes] = []
        while self._starting or self._reopening or self._ending:
            try:
                for arrival in self._engine.poll(POLL_S):
                    self._handle_start(arrival, output)
                on_wait()
            except PoolError:
                if self._state != "failed":
                    self._state = transition(self._state, "failed")
                raise
            if num_interrupts():
                self._state = transition(self._state, "failed")
                raise KeyboardInterrupt
            if time.monotonic() > deadline:
                late = ", ".join(map(str, sorted(self._starting | self._reopening | self._ending)))
                self._fail(f"ranks {late} did not become ready", output)
        self._num_restarts = 0
        if self._state == "starting":
            self._state = transition(self._state, "ready")

    def run(
        self,
        task: str,
        bodies: Mapping[int, dict[str, Any]],
        listener: RequestListener,
        *,
        payloads: Payloads = NO_PAYLOADS,
        num_interrupts: Callable[[], int] = lambda: 0,
        timeout_s: float | None = None,
        may_finish_step: bool = False,
        actions: ActionQueue | None = None,
        poll_s: float = POLL_S,
    ) -> tuple[list[RankResult], Reason | None]:
        """Run a task on the ranks that are keys of ``bodies`` and wait until it has ended on each.

        If a rank raises or dies, or ``num_interrupts()`` (the number of the user's interrupts so far) increases, the
        pool stops the other ranks, as a last resort by SIGKILL: the call never waits for a rank that cannot finish.
        With ``may_finish_step`` the ranks may first end their step and save. The ranks run each action from ``actions``
        after the same step. Every rank receives ``payloads``, which the caller closes.

        Returns the results of the ranks in the order of their arrival, and why the request was stopped early, or None.
        """
        self.wait_ready(num_interrupts)
        self._state = transition(self._state, "busy")
        self._number += 1
        escalation = StopEscalation(self._engine, self._number, self.size, may_finish_step)
        hang_detector = HangDetector(
            self._engine, self._number, self.size, lambda rank, line: listener.on_message(rank, HANG, {"line": line})
        )
        coordinator = ControlCoordinator(self._engine, self._number, ActionQueue() if actions is None else actions)
        results: list[RankResult] = []
        waiting, lost = set(bodies), set[int]()
        unsent = {
            rank
            for rank, body in bodies.items()
            if not self._engine.send(rank, TaskRequest(self._number, task, body), payloads)
        }
        started = time.monotonic()
        deadline = None if timeout_s is None else started + timeout_s
        while waiting:
            arrivals = self._engine.poll(poll_s)
            if unsent and time.monotonic() - started > EXIT_NOTICE_TIMEOUT_S:
                # The engine may have reported the end of these ranks before this request, and does not report it again.
                arrivals += [WorkerEnded(rank, -signal.SIGKILL) for rank in unsent & waiting]
                unsent = set()
            for arrival in arrivals:
                if isinstance(arrival, ObservedState):
                    hang_detector.record_observed(arrival)
                    continue
                if isinstance(arrival, RecordArrived) and _dispatch(
                    escalation, hang_detector, coordinator, arrival, self._number
                ):
                    continue
                if isinstance(arrival, NodeLost):
                    lost.update(arrival.ranks)
                hang_detector.record_progress()
                for result in self._handle_arrival(arrival, listener, waiting, escalation.killed):
                    results.append(result)
                    if result.outcome == "died":
                        escalation.record_death()
                    elif result.outcome == "raised":
                        escalation.record_failure(interrupted_exchange=result.interrupted_exchange)
                    listener.on_result(result)
            if waiting:
                listener.tick()
                if escalation.reason is None:
                    hang_detector.update(waiting)
                    coordinator.update(waiting)
                    if hang_detector.is_stuck:
                        escalation.record_deadlock()
                else:
                    coordinator.cancel()
                escalation.escalate(
                    waiting, num_interrupts(), timed_out=deadline is not None and time.monotonic() > deadline
                )
        coordinator.close()
        self._repair(
            lost.union(result.rank for result in results if result.outcome == "died"),
            must_reopen_group=escalation.must_reopen_group,
        )
        return results, escalation.reason

    def replace_dead(self) -> set[int]:
        """Replace the ranks that have ended since the last request and return them, or all ranks if the pool fails."""
        all_ranks = set(range(self.size))
        if self._state == "failed" or not self._await_replaced():
            return all_ranks
        dead: set[int] = set()
        for arrival in self._engine.poll(0):
            if isinstance(arrival, WorkerEnded):
                dead.add(arrival.rank)
            elif isinstance(arrival, NodeLost):
                dead.update(arrival.ranks)
        if dead:
            self._repair(dead, must_reopen_group=False)
        return all_ranks if self._state == "failed" or not self._await_replaced() else dead

    def _await_replaced(self) -> bool:
        """Wait for ranks that are being replaced; return False if one cannot start."""
        try:
            self.wait_ready()
        except PoolError:
            return False
        return True

    def detach(self) -> None:
        """Stop using the engine, so that another pool can use it."""
        self._state = transition(self._state, "closed")

    def close(self) -> None:
        """End the workers and the engine; a second call does nothing."""
        self.detach()
        self._engine.stop()

    def _handle_arrival(
        self, arrival: Arrival, listener: RequestListener, waiting: set[int], killed: Collection[int]
    ) -> list[RankResult]:
        """Pass an arrival to the listener; return the results of ranks whose request or process it ends."""
        if isinstance(arrival, OutputArrived):
            listener.on_output(arrival.rank, arrival.stream, arrival.data)
        elif isinstance(arrival, EventsArrived):
            listener.on_events(arrival.events)
        elif isinstance(arrival, WorkerEnded):
            waiting.discard(arrival.rank)
            death = WorkerDeath(arrival.code, arrival.rank in killed, arrival.killed_for, arrival.stack)
            return [RankResult(arrival.rank, "died", death=death)]
        elif isinstance(arrival, NodeLost):
            lost = sorted(waiting.intersection(arrival.ranks))
            waiting.difference_update(lost)
            death = WorkerDeath(-signal.SIGKILL, False, lost_node=arrival.reason)
            return [RankResult(rank, "died", death=death) for rank in lost]
        elif isinstance(arrival, RecordArrived):
            record = arrival.record
            if isinstance(record, RankMessage):
                listener.on_message(arrival.rank, record.topic, record.body)
            elif isinstance(record, Reply) and record.number == self._number:
                waiting.discard(arrival.rank)
                result = RankResult(
                    arrival.rank,
                    record.outcome,
                    record.body,
                    arrival.payloads,
                    interrupted_exchange=record.interrupted_exchange,
                )
                return [result]
            close_all(arrival.payloads.values())
        return []

    def _repair(self, dead: Collection[int], *, must_reopen_group: bool) -> None:
        """Replace dead ranks and make every rank open a new process group, without waiting for the ranks."""
        if not dead and not must_reopen_group:
            self._state = transition(self._state, "ready")
            return
        self._state = transition(self._state, "starting")
        try:
            payloads = self._engine.replace(sorted(dead))
        except PoolError:
            self._state = transition(self._state, "failed")
            return
        self._number += 1
        self._starting = set(dead)
        self._reopening = set(range(self.size)) - set(dead)
        for rank in sorted(self._reopening):
            self._engine.send(rank, TaskRequest(self._number, "reopen"), payloads)

    def _handle_start(self, arrival: Arrival, output: list[bytes]) -> None:
        """Handle an arrival while ranks start or open a new process group; ``output`` collects their output."""
        if isinstance(arrival, OutputArrived):
            output.append(arrival.data)
        elif isinstance(arrival, WorkerEnded):
            if arrival.reason:
                self._fail(f"rank {arrival.rank} {arrival.reason}", output)
            self._restart_all_after_end(arrival.rank, output)
        elif isinstance(arrival, NodeLost):
            self._fail(f"{arrival.reason}, while its ranks started", output)
        elif self._ending:
            pass  # all ranks are being killed to be started again: their reports are obsolete
        elif isinstance(arrival, RecordArrived) and isinstance(arrival.record, WorkerReady):
            self._starting.discard(arrival.rank)
        elif isinstance(arrival, RecordArrived) and isinstance(arrival.record, Reply):
            if arrival.record.number != self._number:
                return
            if arrival.record.outcome != "done":
                reason = _describe_error(arrival.record.body)
                self._fail(f"rank {arrival.rank} could not join the new process group: {reason}", output)
            self._reopening.discard(arrival.rank)
        if isinstance(arrival, RecordArrived):
            close_all(arrival.payloads.values())

    def _restart_all_after_end(self, rank: int, output: list[bytes]) -> None:
        """Kill all ranks and start them again: the others would wait for the one that ended.

        Called for each rank that ends; the last call starts the ranks.
        """
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

    def _fail(self, message: str, output: list[bytes]) -> None:
        self._state = transition(self._state, "failed")
        tail = b"".join(output)[-4000:].decode(errors="replace")
        raise PoolError(f"{message}; run `%accelerate restart` to start over. Its last output:\n{tail}")


def _describe_error(body: Mapping[str, Any]) -> str:
    """Return the type and the message of the error in the reply of a rank; programs describe it as a dict or a text."""
    error = body.get("error")
    return f"{error.get('type')}: {error.get('message')}" if isinstance(error, dict) else str(error)


def _dispatch(
    escalation: StopEscalation,
    hang_detector: HangDetector,
    coordinator: ControlCoordinator,
    arrival: RecordArrived,
    number: int,
) -> bool:
    """Pass a record about stopping, positions or actions to its component; return False for any other record.

    Records of an earlier request are dropped.
    """
    record = arrival.record
    if not isinstance(record, Stopped | InterruptReport | FinishAnswer | LocationReport | StepCount | ActionDone):
        return False
    if record.number != number:
        return True
    if isinstance(record, Stopped):
        escalation.record_stopped(arrival.rank)
    elif isinstance(record, InterruptReport):
        escalation.record_interrupt(arrival.rank, is_raised=record.is_raised)
    elif isinstance(record, StepCount):
        coordinator.record_count(arrival.rank, record)
    elif isinstance(record, ActionDone):
        coordinator.record_done(arrival.rank, record)
    elif isinstance(record, FinishAnswer):
        escalation.record_finish_answer(arrival.rank, record.will_end)
    else:
        hang_detector.record_location(arrival.rank, record.location)
    return True
