"""Ranks that do not come: each is named with its line and the collective, and nothing is ended."""

from __future__ import annotations

import time
from typing import Any

import pytest

from accel_nb.pool.messages import QueryLocation
from accel_nb.pool.pool import HANG
from tests.support.pools import HEALTHY, Recorder, results, run_code, running_pool

ASLEEP = "import threading; threading.Event().wait(100)"
REDUCE = "import torch, torch.distributed as dist\ndist.all_reduce(torch.ones(2, 3))"


@pytest.fixture(scope="module")
def running():
    with running_pool(2) as (pool, engine):
        yield pool, engine


@pytest.fixture(scope="module")
def pool(running):
    return running[0]


class HangRecorder(Recorder):
    """Interrupts a request when a line about a hang arrives, and measures the time until then."""

    def __init__(self) -> None:
        super().__init__()
        self.started = time.monotonic()
        self.after = 0.0

    @property
    def lines(self) -> list[tuple[int, str]]:
        return [(rank, body["line"]) for rank, topic, body in self.messages if topic == HANG]

    def count_interrupts(self) -> int:
        if self.lines and not self.after:
            self.after = time.monotonic() - self.started
        return len(self.lines) + (time.monotonic() - self.started > 30)


def hang(pool, *codes: str) -> tuple[int, str]:
    """Run codes of which one hangs; returns the first rank that was named, and the line."""
    recorder = HangRecorder()
    run_code(pool, *codes, recorder=recorder, num_interrupts=recorder.count_interrupts)
    assert recorder.lines, "no rank was named"
    assert results(pool) == HEALTHY
    return recorder.lines[0]


def test_the_rank_that_others_wait_for_is_named_with_its_line_and_the_collective(pool):
    run_code(pool, "import torch, torch.distributed as dist\ndist.barrier()")
    rank, line = hang(pool, REDUCE, ASLEEP)
    assert rank == 1
    assert "rank 0 waits in all_reduce #" in line
    assert "of shape [[2, 3]] for rank 1, which is at line 1 of" in line


def test_a_rank_that_has_ended_and_is_waited_for_is_named(pool):
    rank, line = hang(pool, REDUCE, "pass")
    assert rank == 1
    assert "rank 0 waits in all_reduce" in line
    assert "rank 1 has ended and does not enter it" in line


def test_a_rank_that_ended_is_missed_after_a_request_whose_ranks_were_stopped_at_different_collectives(pool):
    reduce = "dist.all_reduce(torch.ones(1))\n"
    imports = "import torch, torch.distributed as dist\n"
    run_code(pool, imports + 21 * reduce, imports + 20 * reduce)
    exchange = (
        "import torch\nfrom accel_nb.runtime.distributed.process_group import DefaultGroup\n"
        "for _ in range({}): DefaultGroup.exchange().all_gather(torch.ones(3))"
    )
    recorder = HangRecorder()
    _, reason = run_code(pool, exchange.format(2), exchange.format(3), recorder=recorder, timeout_s=30)
    assert "rank 1 waits in all_gather" in recorder.lines[0][1]
    assert reason == "deadlock"
    assert results(pool) == HEALTHY


def test_different_collectives_are_named_with_their_shapes(pool):
    rank, line = hang(
        pool,
        "import torch, torch.distributed as dist\ndist.all_reduce(torch.ones(1))\ndist.barrier()",
        "import torch, torch.distributed as dist\ndist.broadcast(torch.ones(5), 0)\ndist.barrier()",
    )
    assert rank in (0, 1)
    assert "all_reduce" in line or "broadcast" in line


def test_a_stopped_process_is_reported(pool):
    rank, line = hang(pool, REDUCE, "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)")
    assert (rank, line) == (1, "rank 1 does not answer: it is stopped (SIGSTOP)")


def test_a_stopped_process_that_reads_no_queries_does_not_block(running):
    pool, engine = running

    class Asking(HangRecorder):
        """Sends as many queries as a rank gets in ten minutes before it interrupts."""

        def on_message(self, rank: int, topic: str, body: dict[str, Any]) -> None:
            super().on_message(rank, topic, body)
            assert all(engine.send(1, QueryLocation(0), urgent=True) for _ in range(600))

    recorder = Asking()
    _, reason = run_code(
        pool,
        REDUCE,
        "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
        recorder=recorder,
        num_interrupts=recorder.count_interrupts,
    )
    assert reason == "interrupt"
    assert results(pool) == HEALTHY


def test_a_rank_that_prepares_a_request_is_reported_at_its_line(pool, tmp_path):
    run_code(pool, "import torch, torch.distributed as dist\ndist.barrier()")
    end = tmp_path / "end"
    slow = f"import pathlib, time\nwhile not pathlib.Path({str(end)!r}).exists(): time.sleep(0.01)"

    class Ending(HangRecorder):
        """Ends the slow preparation when a line about a hang arrives."""

        def on_message(self, rank, topic, body):
            super().on_message(rank, topic, body)
            end.touch()

    recorder = Ending()
    bodies = {0: {"code": REDUCE}, 1: {"before": slow, "code": REDUCE}}
    answers, _ = pool.run("run", bodies, recorder)
    assert {answer.outcome for answer in answers} == {"done"}
    [(rank, line)] = recorder.lines
    assert rank == 1
    assert "for rank 1, which is at line 2 of" in line


def test_native_code_that_holds_the_interpreter_lock_is_reported_with_its_stack(pool):
    code = "import re\ndef native():\n    re.match('(a|a)+$', 'a' * 60 + 'b')\nnative()"
    rank, line = hang(pool, REDUCE, code)
    assert rank == 1
    assert "native code holds its interpreter lock" in line
    assert "in native" in line


def test_long_work_that_no_rank_waits_for_is_left_alone(pool):
    recorder = HangRecorder()
    until = "import time\nend = time.monotonic() + 5\nwhile time.monotonic() < end: pass"
    answers, _ = run_code(pool, until, recorder=recorder)
    assert {answer.outcome for answer in answers} == {"done"}
    assert recorder.lines == []


@pytest.mark.parametrize("code", ["import ctypes\ndef crash(): ctypes.string_at(0)\ncrash()", "import os\nos.abort()"])
def test_a_crash_has_its_last_python_stack(pool, code: str):
    answers, _ = run_code(pool, "pass", code)
    (death,) = [answer for answer in answers if answer.outcome == "died"]
    assert death.rank == 1
    assert "most recent call first" in death.death.stack
    assert ("in crash" in death.death.stack) == ("crash" in code)
    assert results(pool) == HEALTHY
