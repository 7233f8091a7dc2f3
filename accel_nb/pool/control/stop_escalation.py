"""The early end of a request by escalation: interrupt, close connections, kill.

1. KeyboardInterrupt is raised in every rank that still runs.
2. A rank may still wait in a collective, which no signal ends: it then closes the connections of its process group.
   Its Python state is kept in both stages.
3. A rank that has not stopped after its grace time, or when the user interrupts again, is killed and replaced; its
   state is lost.

After an interrupt by the user, a rank is not killed while its code handles the KeyboardInterrupt, as training code does
to save or to evaluate. If all ranks are at this point when the user interrupts again, or when the timeout has passed,
stage 1 is repeated, and stage 3 follows for every rank that does not stop.

A request that saves checkpoints has a stage before these: its ranks finish the step, save, and stop at the same step,
with an intact process group. Stage 1 follows if a rank reports that no end of a step is near, if ranks stop at
different steps, or if the user interrupts again.

Connections are closed only when no rank makes progress: gloo drops a send over a closed connection, and the receiver
would wait forever. After one rank has stopped, or handles the interrupt, the others wait in the first collective that
it does not enter, and have no data left to send.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from accel_nb.pool.engine import Engine
from accel_nb.pool.messages import AbortCollective, FinishStep, Interrupt, QueryLocation
from accel_nb.pool.payload import Payloads
from accel_nb.runtime.process.oom_detection import KillCause

GRACE_S = 2.0
"""How long a rank that the user or a timeout interrupts may take to stop."""
PEER_GRACE_S = 6.0
"""How long a rank may take to stop after another rank failed: the user does not wait, and a kill loses its state."""
FINISH_TIMEOUT_S = 30.0
"""How long ranks may take to end their step after they reported that they will."""
STACK_S = 0.3
"""The stacks of ranks are requested this long before they are killed, to report where they did not stop."""
QUIET_S = 0.05
"""The time that the other ranks have to complete their sends after one rank has stopped."""
CLOSE_DELAY_S = 0.5
"""Connections are closed this long after the interrupt, even if no rank has stopped."""
MAX_TICK_S = 0.5
"""The most time that one iteration of the waiting loop counts: when this process stalls, ranks may stall too."""
PEER_FAILURE_DELAY_S = 0.2
"""The other ranks are interrupted this long after one rank raised: often all raise the same error."""

Outcome = Literal["done", "raised", "interrupted", "died"]
Reason = Literal["interrupt", "failure", "death", "timeout", "deadlock"]


@dataclass(frozen=True, slots=True)
class WorkerDeath:
    """The end of a rank's process; ``code`` as in `subprocess`: negative is a signal."""

    code: int
    is_killed: bool
    """Whether the pool has killed it."""
    killed_for: KillCause = "unknown"
    stack: str = ""
    """The last Python stack of a process that crashed, or that did not stop and was killed; empty if unknown."""
    lost_node: str = ""
    """The reason of the loss of the rank's node; empty if only the process ended."""


@dataclass(frozen=True, slots=True)
class RankResult:
    """The outcome of a request on one rank; the receiver must close the payloads."""

    rank: int
    outcome: Outcome
    body: dict[str, Any] = field(default_factory=dict)
    """Defined by the program; empty if the process ended."""
    payloads: Payloads = field(default_factory=dict)
    death: WorkerDeath | None = None
    interrupted_exchange: bool = False
    """Whether the request ended in the middle of an exchange with other ranks."""


@dataclass(slots=True)
class StopEscalation:
    """Decides, in each iteration of the waiting loop, whether to interrupt or kill ranks or to close connections."""

    engine: Engine
    number: int
    size: int
    may_finish_step: bool = False
    """Whether ranks may finish their step before they are interrupted."""
    clock: Callable[[], float] = time.monotonic
    reason: Reason | None = None
    killed: set[int] = field(default_factory=set)
    _now: float = 0.0
    """The time of the last call of `escalate`, in seconds that count."""
    _called_at: float | None = None
    _stopped: set[int] = field(default_factory=set)
    _raised: set[int] = field(default_factory=set)
    """The ranks in whose user code the last interrupt was raised."""
    _has_begun_again: bool = False
    _blocking: set[int] = field(default_factory=set)
    """The ranks that run as if there were no interrupt, or wait where it does not reach them."""
    _unchanged_since: float = 0.0
    _has_aborted: bool = False
    _has_requested_stacks: bool = False
    _finish_sent_at: float | None = None
    _finishing: set[int] = field(default_factory=set)
    _interrupted_at: float | None = None
    _failed_at: float | None = None
    _num_interrupts: int = 0
    _interrupted_exchange: bool = False

    @property
    def must_reopen_group(self) -> bool:
        """Whether ranks may have stopped at different collectives, so that the process group is unusable."""
        return (self._interrupted_at is not None or self._interrupted_exchange) and self.size > 1

    def record_failure(self, *, interrupted_exchange: bool = False) -> None:
        """Record that a rank raised: after a short wait the others are interrupted.

        ``interrupted_exchange``: the rank raised in the middle of an exchange with the others.
        """
        self._interrupted_exchange |= interrupted_exchange
        if self._failed_at is None:
            self._failed_at = self._now

    def record_death(self) -> None:
        """Record that the process of a rank ended, so that the others are interrupted at once."""
        self._failed_at = -math.inf
        self.reason = self.reason or "death"

    def record_deadlock(self) -> None:
        """Record that the running ranks wait in collectives that never complete."""
        self._failed_at = -math.inf
        self.reason = self.reason or "deadlock"

    def record_stopped(self, rank: int) -> None:
        """Record that a rank's user code has ended; packing its results may take longer than the grace time."""
        self._stopped.add(rank)

    def record_interrupt(self, rank: int, *, is_raised: bool) -> None:
        """Record that an interrupt was raised in a rank's user code; send it again if the interpreter ignored it."""
        if is_raised:
            self._raised.add(rank)
        else:
            self._raised.discard(rank)
            self._send({rank}, Interrupt(self.number))

    def record_finish_answer(self, rank: int, will_end: bool) -> None:
        """Record whether a rank will finish its step; if one will not, this stage ends for all ranks."""
        if will_end:
            self._finishing.add(rank)
        else:
            self.may_finish_step = False

    def escalate(self, waiting: set[int], num_interrupts: int, *, timed_out: bool = False) -> None:
        """Begin the next stage if it is due.

        ``waiting`` are the ranks on which the request has not ended, ``num_interrupts`` counts the user's interrupts.
        """
        is_interrupted = num_interrupts > self._num_interrupts
        self._num_interrupts = num_interrupts
        now = self._advance()
        running = waiting - self._stopped
        if running - self._raised != self._blocking:
            self._blocking, self._unchanged_since = running - self._raised, now
        if self._interrupted_at is None:
            is_failure_due = self._failed_at is not None and now - self._failed_at >= PEER_FAILURE_DELAY_S
            if is_interrupted or timed_out or is_failure_due:
                self.reason = self.reason or ("interrupt" if is_interrupted else "timeout" if timed_out else "failure")
            if self.reason is None:
                return
            if self.may_finish_step and self._finish_sent_at is None and not is_failure_due:
                self._finish_sent_at = now
                self._send(waiting, FinishStep(self.number))
            elif (
                is_interrupted
                or is_failure_due
                or (running and not self._is_finishing(running, now, timed_out=timed_out))
            ):
                self._interrupt(waiting)
        elif (is_interrupted or timed_out) and running and running <= self._handling:
            self._has_begun_again = True
            self._interrupt(running)
        elif is_interrupted or now - self._interrupted_at > self._grace_s:
            for rank in waiting - self.killed - (set() if is_interrupted else self._stopped | self._handling):
                self.engine.kill(rank)
                self.killed.add(rank)
        elif not self._has_aborted and self._are_blocked(now - self._interrupted_at, now - self._unchanged_since):
            self._has_aborted = True
            self._send(running, AbortCollective(self.number))
        elif not self._has_requested_stacks and now - self._interrupted_at > self._grace_s - STACK_S:
            self._has_requested_stacks = True
            self._send(running - self._handling, QueryLocation(self.number, from_outside=True))

    @property
    def _handling(self) -> set[int]:
        """The ranks whose user code may handle the interrupt for as long as it takes."""
        return self._raised if self.reason == "interrupt" and not self._has_begun_again else set()

    def _interrupt(self, ranks: set[int]) -> None:
        """Interrupt the user code of ranks."""
        self._interrupted_at = self._now
        self._raised = set()
        self._has_requested_stacks = False
        self._send(ranks, Interrupt(self.number))

    def _advance(self) -> float:
        called_at = self.clock()
        if self._called_at is not None:
            self._now += min(called_at - self._called_at, MAX_TICK_S)
        self._called_at = called_at
        return self._now

    @property
    def _grace_s(self) -> float:
        return GRACE_S if self.reason in ("interrupt", "timeout") else PEER_GRACE_S

    def _is_finishing(self, running: set[int], now: float, *, timed_out: bool) -> bool:
        """Return whether ranks may still reach the end of their step, or handle the interrupt that it ended with."""
        if self._finish_sent_at is None or not self.may_finish_step:
            return False
        if running <= self._handling and not timed_out:
            return True
        is_incomplete = len(self._blocking) < self.size and now - self._unchanged_since > GRACE_S
        timeout_s = FINISH_TIMEOUT_S if running <= self._finishing else GRACE_S
        return not is_incomplete and now - self._finish_sent_at <= timeout_s

    def _are_blocked(self, elapsed_s: float, quiet_s: float) -> bool:
        some_left = len(self._blocking) < self.size
        return self.size > 1 and (elapsed_s > CLOSE_DELAY_S or (some_left and min(elapsed_s, quiet_s) > QUIET_S))

    def _send(self, ranks: set[int], record: FinishStep | Interrupt | AbortCollective | QueryLocation) -> None:
        for rank in ranks:
            self.engine.send(rank, record, urgent=True)


_KILLED_FOR: Mapping[KillCause, str] = {
    "group": " by the system: the memory that its container or control group may use was used up",
    "machine": " by the system, as it seems: the machine ran out of memory at that moment",
    "other": " (not by the system for lack of memory: its counter of such kills did not change)",
    "unknown": " (often the system running out of memory)",
}


def describe_exit(code: int, killed_for: KillCause = "unknown") -> str:
    """Describe how a process ended: by which signal and why, or with which exit code."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was ended by {name}{_KILLED_FOR[killed_for] if -code == signal.SIGKILL else ''}"
