"""When ranks are interrupted, their connections closed and their processes killed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from accel_nb.pool.control.stop_escalation import GRACE_S, PEER_GRACE_S, StopEscalation
from accel_nb.pool.messages import AbortCollective, FinishStep, Interrupt, QueryLocation


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
    num_interrupts: int = 0
    engine: RecordingEngine = field(default_factory=RecordingEngine)

    def __post_init__(self) -> None:
        self.escalation = StopEscalation(self.engine, 1, 2, clock=lambda: self.now)  # type: ignore[arg-type]
        self.wait(0.1)

    def interrupt(self) -> None:
        """Interrupt as the user does."""
        self.num_interrupts += 1
        self.escalation.escalate({1}, self.num_interrupts)

    def wait(self, duration_s: float, tick_s: float = 0.05) -> None:
        """Iterate as the pool does until ``duration_s`` have passed."""
        for _ in range(round(duration_s / tick_s)):
            self.now += tick_s
            self.escalation.escalate({1}, self.num_interrupts)


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


def test_a_rank_whose_code_handles_the_interrupt_is_not_killed():
    case = Case()
    case.interrupt()
    case.escalation.record_interrupt(1, is_raised=True)
    case.wait(60)
    assert set(case.engine.actions) == {Interrupt, AbortCollective}


def test_a_second_interrupt_ends_a_rank_that_goes_on_after_handling_the_first():
    case = Case()
    case.interrupt()
    case.escalation.record_interrupt(1, is_raised=True)
    case.wait(60)
    case.engine.actions.clear()
    case.interrupt()
    case.escalation.record_interrupt(1, is_raised=True)
    case.wait(GRACE_S - 0.5)
    assert set(case.engine.actions) == {Interrupt}
    case.wait(1)
    assert case.engine.actions[-1] == "kill"


def test_a_second_interrupt_kills_a_rank_that_the_first_has_not_reached():
    case = Case()
    case.interrupt()
    case.wait(0.1)
    case.interrupt()
    assert case.engine.actions[-1] == "kill"


def test_a_third_interrupt_kills_at_once():
    case = Case()
    for _ in range(2):
        case.interrupt()
        case.escalation.record_interrupt(1, is_raised=True)
    case.interrupt()
    assert case.engine.actions[-1] == "kill"


def test_a_timeout_ends_a_rank_that_handles_an_interrupt():
    case = Case()
    case.interrupt()
    case.escalation.record_interrupt(1, is_raised=True)
    case.wait(60)
    for _ in range(60):
        case.now += 0.05
        case.escalation.escalate({1}, 1, timed_out=True)
    assert case.engine.actions.count(Interrupt) == 2
    assert case.engine.actions[-1] == "kill"


def test_code_that_handles_what_a_timeout_raises_is_ended():
    case = Case()
    case.escalation.escalate({1}, 0, timed_out=True)
    case.escalation.record_interrupt(1, is_raised=True)
    case.wait(GRACE_S + 0.5)
    assert case.engine.actions == STAGES


def test_an_interrupt_that_the_interpreter_ignored_is_sent_again():
    case = Case()
    case.interrupt()
    case.escalation.record_interrupt(1, is_raised=True)
    case.escalation.record_interrupt(1, is_raised=False)
    case.wait(GRACE_S + 0.5)
    assert case.engine.actions == [Interrupt, *STAGES]


def test_a_rank_that_goes_on_after_the_step_at_which_all_stop_keeps_its_connections():
    case = Case()
    case.escalation.may_finish_step = True
    case.interrupt()
    case.escalation.record_finish_answer(1, True)
    case.escalation.record_interrupt(1, is_raised=True)
    case.wait(60)
    assert case.engine.actions == [FinishStep]
