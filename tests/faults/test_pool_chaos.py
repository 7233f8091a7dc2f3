"""A short version of the long runs in ``tests.faults.chaos``, and a limit of memory."""

from __future__ import annotations

from pathlib import Path

import psutil

from accel_nb.runtime.process.oom_detection import KillCounters
from tests.faults.chaos import FAULTS, chaos, descendants, soak
from tests.support.pools import HEALTHY, results, run_code, running_pool


def test_a_pool_recovers_from_faults_drawn_by_chance():
    with running_pool(3) as (pool, engine):
        outcome = chaos(pool, 10, seed=3)
        processes = descendants(engine)
    assert (outcome.num_recovered, outcome.lost) == (10, [])
    _, alive = psutil.wait_procs(processes, timeout=5)
    assert alive == []


def test_each_fault_of_the_long_run_is_survived():
    with running_pool(2) as (pool, _):
        for code, needs_interrupt in FAULTS.values():
            if not needs_interrupt:
                answers, reason = run_code(pool, code, "import threading; threading.Event().wait(100)")
                assert reason in ("failure", "death")
                assert answers[0].rank == 0
                assert results(pool) == HEALTHY


def test_many_requests_leave_nothing_behind():
    with running_pool(2) as (pool, _):
        growth = soak(pool, 400)
    assert growth.num_descriptors <= 0
    assert growth.rss_bytes < 20_000_000


def test_a_rank_that_meets_its_memory_limit_raises_and_lives_on():
    code = (
        "import resource\nbefore = resource.getrlimit(resource.RLIMIT_AS)\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, before[1]))\n"
        "try:\n    block = bytearray(2**30)\nfinally:\n    resource.setrlimit(resource.RLIMIT_AS, before)"
    )
    with running_pool(2) as (pool, engine):
        pids = dict(engine.pids)
        answers, reason = run_code(pool, code, "import threading; threading.Event().wait(100)")
        assert reason == "failure"
        assert answers[0].body["error"]["type"] == "MemoryError"
        assert results(pool) == HEALTHY
        assert engine.pids == pids


def test_a_kill_for_lack_of_memory_is_distinguished_from_another_one(tmp_path: Path):
    """The kills are real; what the system counts is a file that the test writes, as a control group has it."""
    counter = tmp_path / "memory.events"
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("0::/\n")
    counter.write_text("oom_kill 0\n")
    kill = "import os\nos.kill(os.getpid(), 9)"
    with running_pool(2, kill_counters=KillCounters(tmp_path, tmp_path)) as (pool, _):
        for before, why in ((f"open({str(counter)!r}, 'w').write('oom_kill 1')\n", "group"), ("", "other")):
            answers, reason = run_code(pool, before + kill, "import threading; threading.Event().wait(100)")
            assert reason == "death"
            (death,) = [answer for answer in answers if answer.outcome == "died"]
            assert death.death.killed_for == why
        assert results(pool) == HEALTHY


def test_what_is_no_message_is_dropped_and_the_pool_goes_on():
    """A cell that writes into every socket it has, its own way to the kernel among them."""
    code = (
        "import os, stat\n"
        "for name in os.listdir('/proc/self/fd'):\n"
        "    try:\n"
        "        if os.readlink(f'/proc/self/fd/{name}') in ours: os.write(int(name), b'i{\"kind\": \"reply\"}')\n"
        "    except OSError: pass\n"
    )
    find = "ours = {os.readlink(f'/proc/self/fd/{channel.fileno()}') for channel in (worker._control,)}\n"
    with running_pool(2) as (pool, engine):
        assert {answer.outcome for answer in run_code(pool, f"import os\n{find}{code}")[0]} == {"done"}
        assert engine.num_refused == 2
        assert results(pool) == HEALTHY
