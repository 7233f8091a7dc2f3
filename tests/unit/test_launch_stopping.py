"""When the ranks of a job are asked to finish, interrupted and ended; with a clock of the test's own."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
from typing import Any

import pytest

from accel_nb.launch.local_job import PEER_EXIT_TIMEOUT_S, JobStopper, LocalJob, RankProcess
from accel_nb.launch.rank_task import RankTask
from accel_nb.pool.control.stop_escalation import FINISH_TIMEOUT_S, GRACE_S, PEER_FAILURE_DELAY_S
from accel_nb.pool.engine import WorkerSpec


class Job:
    """Ranks that note what they are sent."""

    def __init__(self, *, promises: bool = False, handles: bool = False, finishes: bool = False) -> None:
        nothing: Any = None
        self.ranks = [RankProcess(number, nothing, -1, -1, -1, None) for number in (0, 1)]
        self.now = 0.0
        self.presses = 0
        self.handles = handles
        self.sent: list[tuple[int, int]] = []
        self.stopper = JobStopper(
            self.ranks,
            finishes,
            clock=lambda: self.now,
            will_finish=lambda rank: promises,
            is_handling=lambda rank: self.handles,
            send=lambda rank, number: self.sent.append((rank.number, number)),
        )

    def after(self, seconds: float, *, press: bool = False, is_late: bool = False) -> list[tuple[int, int]]:
        """Advance the clock and return what was sent by then."""
        self.now += seconds
        self.presses += press
        self.sent.clear()
        self.stopper.update(lambda: self.presses, is_late=is_late)
        return list(self.sent)


def both(number: int) -> list[tuple[int, int]]:
    return [(0, number), (1, number)]


@pytest.mark.parametrize("is_pressed", [True, False])
def test_a_job_that_saves_is_asked_then_interrupted_then_ended(is_pressed: bool):
    job = Job(promises=is_pressed, finishes=not is_pressed)
    assert job.after(1) == []
    assert job.after(0, press=is_pressed, is_late=not is_pressed) == both(signal.SIGTERM)
    assert job.stopper.reason == ("interrupted" if is_pressed else "timeout")
    assert job.after(FINISH_TIMEOUT_S - 1) == []
    assert job.after(2) == both(signal.SIGINT)
    assert job.after(GRACE_S - 0.5) == []
    assert job.after(1) == both(signal.SIGKILL)


def test_an_interrupt_that_arrives_while_the_count_is_read_is_not_lost():
    job, counts = Job(), iter([0, 1, 1, 1])
    job.stopper.update(lambda: next(counts))
    job.stopper.update(lambda: next(counts))
    assert job.stopper.reason == "interrupted"


def test_each_further_interrupt_takes_the_next_step_at_once():
    job = Job(promises=True)
    assert [job.after(0, press=True) for _ in range(3)] == [
        both(signal.SIGTERM),
        both(signal.SIGINT),
        both(signal.SIGKILL),
    ]


def test_a_job_that_does_not_save_gets_little_time():
    job = Job()
    assert job.after(0, press=True) == both(signal.SIGTERM)
    assert job.after(GRACE_S + 0.1) == both(signal.SIGINT)


def test_ranks_whose_code_handles_the_interrupt_are_waited_for():
    job = Job(handles=True)
    assert job.after(0, press=True) == both(signal.SIGTERM)
    assert job.after(100) == []
    job.handles = False  # the code has ended
    assert job.after(GRACE_S - 0.1) == []
    assert job.after(0.2) == both(signal.SIGINT)


def test_a_second_interrupt_is_raised_in_code_that_handles_the_first():
    job = Job(handles=True)
    job.after(0, press=True)
    assert job.after(100, press=True) == both(signal.SIGINT)
    assert job.after(GRACE_S + 0.1) == both(signal.SIGKILL)


def test_a_timeout_ends_code_that_handles_what_it_raises():
    job = Job(handles=True)
    assert job.after(0, is_late=True) == both(signal.SIGTERM)
    assert job.after(GRACE_S + 0.1, is_late=True) == both(signal.SIGINT)


def test_after_a_failure_the_others_get_a_moment_and_are_not_asked_to_save():
    job = Job(promises=True)
    job.ranks[1].code = 1
    assert job.after(0) == []
    assert job.after(PEER_FAILURE_DELAY_S + 0.1) == [(0, signal.SIGINT)]
    assert job.stopper.reason == "failed"
    assert [rank.was_killed for rank in job.ranks] == [True, False]


def test_a_rank_that_ends_well_stops_no_other():
    job = Job()
    job.ranks[1].code = 0
    assert job.after(100) == []
    assert job.stopper.reason is None


def test_ranks_that_finish_are_waited_for_together():
    job = Job(promises=True)
    job.after(0, press=True)
    job.ranks[1].code = 143
    assert job.after(PEER_EXIT_TIMEOUT_S / 2) == []
    assert job.after(PEER_EXIT_TIMEOUT_S + 0.1) == [(0, signal.SIGINT)]


def test_the_report_of_a_failure_may_be_long() -> None:
    report = os.memfd_create("report")
    os.write(report, json.dumps({"type": "RuntimeError", "traceback": "x" * 3_000_000}).encode())
    nothing: Any = None
    failed = RankProcess(0, nothing, -1, report, -1, None).failure_report()
    os.close(report)
    assert failed is not None
    assert len(failed["traceback"]) == 3_000_000


def test_a_rank_that_cannot_be_watched_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Recorded(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)

    def refuse(pid: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    monkeypatch.setattr(os, "pidfd_open", refuse)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="Too many open files"):
        LocalJob(RankTask("script", "none.py"), (), [WorkerSpec("cpu", 1)] * 2).run()
    assert os.listdir("/proc/self/fd") == before
    assert [process.returncode for process in started] == [-signal.SIGKILL]
