"""When ranks are interrupted, their connections closed and their processes killed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from accel_nb.pool.control.stop_escalation import GRACE_S, PEER_GRACE_S, StopEscalation
from accel_nb.pool.messages import AbortCollective, Interrupt, QueryLocation


@dataclass
class RecordingEngine:
    """Records what is sent to ranks, and which ranks are killed."""

    actions: list[Any] = field(default_factory=list)

    def send(self, rank: int, record: object, payloads: object = None, *, urgent: bool = False) -> bool:
        self.actions.append(type(record))
        return True

    def kill(self, rank: int) -> None:
        self.actions.append("kill")


@dataclass
class Case:
    """One rank of two that does not stop, and the time that the pool's clock shows."""

    now: float = 100.0
    engine: RecordingEngine = field(default_factory=RecordingEngine)

    def __post_init__(self) -> None:
        self.escalation = StopEscalation(self.engine, 1, 2, clock=lambda: self.now)  # type: ignore[arg-type]
        self.wait(0.1)

    def wait(self, duration_s: float, tick_s: float = 0.05) -> None:
        """Iterate as the pool does until ``duration_s`` have passed."""
        for _ in range(round(duration_s / tick_s)):
            self.now += tick_s
            self.escalation.escalate({1}, 0)


STAGES = [Interrupt, AbortCollective, QueryLocation, "kill"]


def test_a_rank_that_does_not_stop_is_killed_after_the_grace_time():
    case = Case()
    case.escalation.record_death()
    case.wait(PEER_GRACE_S - 0.5)
    assert case.engine.actions == STAGES[:2]
    case.wait(1)
    assert case.engine.actions == STAGES


def test_the_grace_time_of_a_timeout_is_shorter():
    case = Case()
    case.escalation.escalate({1}, 0, timed_out=True)
    case.wait(GRACE_S + 0.5)
    assert case.engine.actions == STAGES


@pytest.mark.parametrize("stall_s", [PEER_GRACE_S + 1, 3600.0])
def test_a_stall_of_the_pools_own_process_does_not_kill_a_rank(stall_s):
    case = Case()
    case.escalation.record_death()
    case.wait(0.05)
    case.now += stall_s
    case.wait(PEER_GRACE_S - 1)
    assert case.engine.actions == STAGES[:2]
