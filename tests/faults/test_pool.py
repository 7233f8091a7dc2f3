"""Faults in real worker processes: whatever one rank does, the pool answers and goes on."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time

import psutil
import pytest

from accel_nb.errors import IllegalTransition, PoolError
from accel_nb.pool.control.stop_escalation import GRACE_S
from accel_nb.pool.engine import WorkerEnded, WorkerSpec
from accel_nb.pool.local.engine import LocalEngine
from accel_nb.pool.pool import Pool
from accel_nb.pool.pool_state import transition
from tests.conftest import wait_for
from tests.support.pools import HEALTHY, PRELOAD, PROGRAM, REDUCE, Recorder, results, run_code, running_pool


@pytest.fixture(scope="module")
def pool_and_engine():
    with running_pool(2) as both:
        yield both


@pytest.fixture
def pool(pool_and_engine):
    return pool_and_engine[0]


def after(seconds: float):
    """Return a function that counts interrupts: none until ``seconds`` have passed, then one."""
    start = time.monotonic()
    return lambda: int(time.monotonic() - start > seconds)


def test_workers_keep_their_names_between_requests(pool):
    run_code(pool, "kept = worker.world.rank + 10")
    answers, _ = run_code(pool, "result = kept")
    assert sorted(answer.body["result"] for answer in answers) == [10, 11]


def test_one_rank_raises_while_the_other_waits_in_a_collective(pool):
    answers, reason = run_code(pool, "raise ValueError('only here')", REDUCE)
    assert reason == "failure"
    assert (answers[0].rank, answers[0].outcome, answers[0].body["error"]["message"]) == (0, "raised", "only here")
    assert results(pool) == HEALTHY


def test_interrupt_keeps_state_with_one_rank_asleep_and_one_in_a_collective(pool):
    run_code(pool, "kept = 5")
    answers, reason = run_code(pool, "import threading; threading.Event().wait(100)", REDUCE, num_interrupts=after(0.2))
    assert reason == "interrupt"
    assert {answer.outcome for answer in answers} <= {"interrupted", "raised"}
    answers, _ = run_code(pool, "result = kept")
    assert [answer.body["result"] for answer in answers] == [5, 5]
    assert results(pool) == HEALTHY


def test_interrupt_reaches_a_rank_that_waits_in_a_subgroup(pool):
    code = """
import torch, torch.distributed as dist
group = dist.new_group([0, 1])
if worker.world.rank == 0:
    dist.all_reduce(torch.ones(1), group=group)
"""
    answers, _ = run_code(
        pool, code + "else:\n    import threading; threading.Event().wait(100)", num_interrupts=after(0.3)
    )
    assert len(answers) == 2
    assert not any(answer.outcome == "died" for answer in answers)
    assert results(pool) == HEALTHY


def test_mismatched_collectives_are_interrupted(pool):
    one = "import torch, torch.distributed as dist\ndist.all_reduce(torch.ones(1))"
    two = "import torch, torch.distributed as dist\ndist.barrier(); dist.broadcast(torch.ones(4), 0)"
    answers, _ = run_code(pool, one, two, num_interrupts=after(0.3))
    assert len(answers) == 2
    assert results(pool) == HEALTHY


FINISHING = """
import threading
finish_requested = threading.Event()
def finish():
    finish_requested.set()
    return {will}
before = globals().get("reopened", 0)
"""
FINISH = "finish_requested.wait(100)\nraise KeyboardInterrupt"


def test_ranks_that_finish_by_themselves_keep_their_group(pool):
    run_code(pool, FINISHING.format(will=True))
    answers, reason = run_code(pool, FINISH, num_interrupts=after(0.2), may_finish_step=True)
    assert reason == "interrupt"
    assert {answer.outcome for answer in answers} == {"interrupted"}
    answers, _ = run_code(pool, "result = globals().get('reopened', 0) - before")
    assert [answer.body["result"] for answer in answers] == [0, 0]
    assert results(pool) == HEALTHY


def test_a_rank_that_will_not_finish_is_interrupted_at_once(pool):
    run_code(pool, FINISHING.format(will="worker.world.rank == 0"))
    started = time.monotonic()
    answers, reason = run_code(
        pool,
        "threading.Event().wait(100)",
        REDUCE + "threading.Event().wait(100)",
        num_interrupts=after(0.2),
        may_finish_step=True,
    )
    assert reason == "interrupt"
    assert {answer.outcome for answer in answers} <= {"interrupted", "raised"}
    assert time.monotonic() - started < 20  # far from the patience with ranks that promise to finish
    assert results(pool) == HEALTHY


def test_a_second_interrupt_does_not_wait_for_the_end_of_a_step(pool):
    run_code(pool, FINISHING.format(will=True))
    start = time.monotonic()
    answers, _ = run_code(
        pool,
        "threading.Event().wait(100)",
        num_interrupts=lambda: int((time.monotonic() - start) / 0.3),
        may_finish_step=True,
    )
    assert "done" not in {answer.outcome for answer in answers}
    assert results(pool) == HEALTHY


def test_a_timeout_allows_ranks_to_finish_too(pool):
    run_code(pool, FINISHING.format(will=True))
    answers, reason = run_code(pool, FINISH, timeout_s=0.2, may_finish_step=True)
    assert reason == "timeout"
    assert {answer.outcome for answer in answers} == {"interrupted"}


def test_an_interrupt_that_comes_before_the_user_code_is_not_lost(pool, tmp_path):
    ready, num_asked = tmp_path / "ready", 0

    def num_interrupts() -> int:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 3:  # the ranks have received the request at the first
            ready.touch()
        return 1

    wait = f"import os, threading\nwhile not os.path.exists({str(ready)!r}):\n    threading.Event().wait(0.01)"
    body = {"before": wait, "code": "threading.Event().wait(100)"}
    answers, reason = pool.run("run", dict.fromkeys(range(2), body), Recorder(), num_interrupts=num_interrupts)
    assert (reason, [answer.outcome for answer in answers]) == ("interrupt", ["interrupted"] * 2)
    assert results(pool) == HEALTHY


def test_a_rank_that_dies_frees_another_that_is_getting_ready(pool):
    bodies = {0: {"before": REDUCE, "code": ""}, 1: {"code": "import os; os._exit(3)"}}
    answers, reason = pool.run("run", bodies, Recorder())
    assert (reason, {answer.rank: answer.outcome for answer in answers}) == ("death", {0: "raised", 1: "died"})
    assert results(pool) == HEALTHY


def test_endless_loop_is_interrupted(pool):
    answers, _ = run_code(pool, "while True: pass", num_interrupts=after(0.1))
    assert {answer.outcome for answer in answers} == {"interrupted"}


def test_a_rank_that_ignores_the_interrupt_is_killed_and_replaced(pool):
    deaf = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"
    num_interrupts = iter([0] * 6 + [1] * 40 + [2] * 10_000)  # the other rank has ended before the second
    answers, reason = run_code(pool, deaf, "while True: pass", num_interrupts=lambda: next(num_interrupts))
    assert reason == "interrupt"
    assert {answer.rank: answer.outcome for answer in answers} == {0: "died", 1: "interrupted"}
    assert results(pool) == HEALTHY


ENDLESS = "print('go', flush=True)\nwhile True: pass"
HANDLING = """
import time
try:
    print("go", flush=True)
    while True: pass
except KeyboardInterrupt:
    until = time.monotonic() + {seconds}
    print("handling", flush=True)
    while time.monotonic() < until: pass
"""


def all_have_printed(recorder: Recorder, *words: bytes):
    """Return a function that counts interrupts: one for each of the words that both ranks have printed."""
    return lambda: sum(all(word in recorder.text.get((rank, "stdout"), b"") for rank in range(2)) for word in words)


def test_code_that_handles_an_interrupt_may_take_long(pool):
    code, recorder = HANDLING.format(seconds=GRACE_S + 0.5) + "result = 3", Recorder()
    answers, reason = run_code(pool, code, ENDLESS, recorder=recorder, num_interrupts=all_have_printed(recorder, b"go"))
    assert reason == "interrupt"
    assert {answer.rank: (answer.outcome, answer.body.get("result")) for answer in answers} == {
        0: ("done", 3),
        1: ("interrupted", None),
    }
    assert results(pool) == HEALTHY


def test_code_that_handles_an_interrupt_is_interrupted_again_by_a_second_one(pool):
    run_code(pool, "kept = 7")
    recorder = Recorder()
    num_interrupts = all_have_printed(recorder, b"go", b"handling")
    answers, _ = run_code(pool, HANDLING.format(seconds=60), recorder=recorder, num_interrupts=num_interrupts)
    assert [answer.outcome for answer in answers] == ["interrupted"] * 2
    answers, _ = run_code(pool, "result = kept")
    assert [answer.body["result"] for answer in answers] == [7, 7]


def test_a_collective_of_code_that_handles_an_interrupt_waits_for_no_rank_that_has_left(pool):
    code, recorder = HANDLING.format(seconds=0) + REDUCE, Recorder()
    answers, _ = run_code(pool, code, ENDLESS, recorder=recorder, num_interrupts=all_have_printed(recorder, b"go"))
    assert {answer.rank: answer.outcome for answer in answers} == {0: "raised", 1: "interrupted"}
    assert results(pool) == HEALTHY


def test_an_interrupt_that_comes_as_the_user_code_has_ended_is_none(pool):
    at_exit = """
import signal, sys
def interrupt(frame, event, arg):
    if event == "call" and frame.f_code.co_name == "__exit__":
        sys.setprofile(None)
        worker._interrupted_request = worker._running_request
        signal.raise_signal(signal.SIGINT)
sys.setprofile(interrupt)
"""
    answers, _ = run_code(pool, at_exit)
    assert [answer.outcome for answer in answers] == ["done"] * 2
    recorder = Recorder()
    answers, _ = run_code(pool, ENDLESS, recorder=recorder, num_interrupts=all_have_printed(recorder, b"go"))
    assert [answer.outcome for answer in answers] == ["interrupted"] * 2


def test_an_interrupt_in_a_destructor_is_not_lost(pool):
    recorder = Recorder()
    code = """
class Slow:
    def __del__(self):
        print("go", flush=True)
        while True: pass
Slow()
while True: pass
"""
    answers, _ = run_code(pool, code, recorder=recorder, num_interrupts=all_have_printed(recorder, b"go"))
    assert [answer.outcome for answer in answers] == ["interrupted"] * 2
    assert (0, "stderr") not in recorder.text


def test_an_interrupt_while_one_in_a_destructor_is_reported_is_not_lost(pool):
    recorder = Recorder()
    code = """
import signal, sys
def interrupt(frame, event, arg):
    if event == "call" and frame.f_code.co_name == "_handle_unraisable":
        sys.setprofile(None)
        signal.raise_signal(signal.SIGINT)
sys.setprofile(interrupt)
class Slow:
    def __del__(self):
        print("go", flush=True)
        while True: pass
Slow()
while True: pass
"""
    answers, _ = run_code(pool, code, recorder=recorder, num_interrupts=all_have_printed(recorder, b"go"))
    assert [answer.outcome for answer in answers] == ["interrupted"] * 2
    assert (0, "stderr") not in recorder.text


@pytest.mark.parametrize("code", ["import os; os._exit(0)", "import os; os._exit(7)", "import os; os.abort()"])
def test_a_rank_that_exits_is_named_and_replaced(pool, code):
    answers, reason = run_code(pool, REDUCE, code)
    dead = [answer for answer in answers if answer.outcome == "died"]
    assert reason == "death"
    assert [answer.rank for answer in dead] == [1]
    assert not dead[0].death.is_killed
    assert results(pool) == HEALTHY


def test_death_of_a_rank_that_others_wait_for_in_a_collective(pool_and_engine):
    pool, engine = pool_and_engine
    pids = dict(engine.pids)
    answers, _ = run_code(pool, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", REDUCE)
    deaths = {answer.rank: answer.death for answer in answers if answer.outcome == "died"}
    assert deaths.keys() == {0}, "\n".join(death.stack for death in deaths.values())
    assert (deaths[0].code, deaths[0].is_killed) == (-9, False)
    assert results(pool) == HEALTHY
    assert engine.pids[1] == pids[1]


def test_kill_of_one_rank_inside_a_collective(pool_and_engine):
    pool, engine = pool_and_engine
    code = f"import os, signal; os.kill({engine.pids[0]}, signal.SIGKILL)\n"
    answers, _ = run_code(pool, REDUCE, code + REDUCE)
    deaths = {answer.rank: answer.death for answer in answers if answer.outcome == "died"}
    assert (deaths[0].code, deaths[0].is_killed) == (-9, False)
    if 1 in deaths:  # gloo waits for ever if the other rank dies just before it is sent to: see decision 373
        assert deaths[1].is_killed
        assert "all_reduce" in deaths[1].stack
    assert results(pool) == HEALTHY


def test_kill_of_one_rank_and_of_all_while_idle(pool_and_engine):
    pool, engine = pool_and_engine
    for victims in ([1], [0, 1]):
        before = dict(engine.pids)
        for rank in victims:
            os.kill(before[rank], signal.SIGKILL)
        assert wait_for(pool.replace_dead)
        assert results(pool) == HEALTHY
        assert all(engine.pids[rank] != before[rank] for rank in victims)


def test_timeout_stops_a_request(pool):
    _, reason = run_code(pool, "while True: pass", timeout_s=0.2)
    assert reason == "timeout"
    assert results(pool) == HEALTHY


def test_the_stack_of_a_rank_that_ignores_a_timeout_is_reported(pool):
    ignoring = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"
    answers, _ = run_code(pool, ignoring, "while True: pass", timeout_s=0.2)
    stacks = {answer.rank: answer.death.stack for answer in answers if answer.outcome == "died"}
    assert stacks.keys() == {0}
    assert 'File "<string>", line 3 in <module>' in stacks[0]
    assert results(pool) == HEALTHY


def test_many_lines_arrive_whole_and_in_order(pool):
    recorder = Recorder()
    run_code(pool, "for i in range(200_000): print(i)", "pass", recorder=recorder)
    assert recorder.text[0, "stdout"].decode().split() == [str(i) for i in range(200_000)]


def test_output_of_c_code_and_children_arrives(pool):
    recorder = Recorder()
    code = "import ctypes, os, sys; ctypes.CDLL(None).puts(b'from C'); ctypes.CDLL(None).fflush(None)\n"
    run_code(pool, code + "os.system('echo from a child; echo to stderr >&2')", "pass", recorder=recorder)
    assert recorder.text[0, "stdout"] == b"from C\nfrom a child\n"
    assert recorder.text[0, "stderr"] == b"to stderr\n"


def test_long_messages_arrive(pool):
    answers, _ = run_code(pool, "result = 'x' * 3_000_000", "result = 1")
    assert [len(answer.body["result"]) for answer in answers if answer.rank == 0] == [3_000_000]


def test_zygote_death_ends_the_workers_and_is_reported():
    with running_pool(2) as (pool, engine):
        pids = list(engine.pids.values())
        os.kill(engine.zygote_pid, signal.SIGKILL)
        answers, _ = run_code(pool, "import threading; threading.Event().wait(60)")
        assert [answer.outcome for answer in answers] == ["died", "died"]
        assert pool.state == "failed"
        assert wait_for(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def test_death_of_the_owner_leaves_nothing(tmp_path):
    script = """
import os, sys
from tests.support.pools import running_pool, run_code
with running_pool(2) as (pool, engine):
    print(engine.zygote_pid, *engine.pids.values(), flush=True)
    run_code(pool, "import subprocess; subprocess.Popen(['sleep', '600'])")
    print("busy", flush=True)
    run_code(pool, "import torch.distributed as dist, torch; dist.all_reduce(torch.ones(1))",
             "import threading; threading.Event().wait(600)")
"""
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pids = [int(word) for word in owner.stdout.readline().split()]
    assert owner.stdout.readline().strip() == "busy"
    everyone = [*pids, *(child.pid for pid in pids for child in psutil.Process(pid).children(recursive=True))]
    owner.kill()
    owner.wait()
    owner.stdout.close()
    assert wait_for(lambda: not any(_is_alive(pid) for pid in everyone), 20.0)


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_nothing_listens_beyond_loopback(pool_and_engine):
    _, engine = pool_and_engine
    for pid in [engine.zygote_pid, *engine.pids.values()]:
        for connection in psutil.Process(pid).net_connections(kind="inet"):
            assert connection.laddr.ip == "127.0.0.1"


def test_closing_twice_is_harmless_and_a_closed_pool_stays_closed():
    with running_pool(1) as (pool, _):
        pool.close()
        pool.close()
        with pytest.raises(IllegalTransition, match="'closed' cannot become 'busy'"):
            run_code(pool, "pass")


def test_states_move_only_as_listed():
    assert transition("ready", "busy") == "busy"
    with pytest.raises(IllegalTransition, match="'failed' cannot become 'busy'; it can become closed, starting"):
        transition("failed", "busy")


def test_the_zygote_has_one_thread(pool_and_engine):
    _, engine = pool_and_engine
    assert len(os.listdir(f"/proc/{engine.zygote_pid}/task")) == 1


def test_a_worker_that_the_system_refuses_is_named_at_once():
    engine = LocalEngine(PROGRAM, preload=(*PRELOAD, "tests.support.programs:refuse_processes"))
    try:
        pool = Pool(engine, [WorkerSpec("cpu", 1)] * 2)
        with pytest.raises(
            PoolError, match=r"rank 0 could not be started: the system refused .*Cannot allocate memory"
        ):
            pool.wait_ready()
        assert pool.state == "failed"
        assert psutil.pid_exists(engine.zygote_pid), "it lives on and says so"
    finally:
        engine.stop()


def test_a_deleted_working_folder_is_named(tmp_path, monkeypatch):
    engine = LocalEngine(PROGRAM, preload=PRELOAD)
    try:
        (tmp_path / "gone").mkdir()
        monkeypatch.chdir(tmp_path / "gone")
        (tmp_path / "gone").rmdir()
        with pytest.raises(PoolError, match="working folder was deleted: change to another one with %cd"):
            engine.start([WorkerSpec("cpu", 1)])
    finally:
        engine.stop()


@pytest.mark.parametrize("spare", range(1, 17, 3))
def test_without_descriptors_the_start_fails_and_leaves_none_behind(spare):
    engine = LocalEngine(PROGRAM, preload=PRELOAD)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        assert wait_for(lambda: engine.refresh() or engine.is_warm, 60)
        used = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (_limit_with(spare), hard))
        with pytest.raises((PoolError, OSError), match="Too many open files"):
            engine.start([WorkerSpec("cpu", 1)] * 8)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        engine.start([])
        assert len(os.listdir("/proc/self/fd")) <= used + 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        engine.stop()


def _limit_with(spare: int) -> int:
    """Return the limit of open files that leaves room for so many more."""
    taken = set(map(int, os.listdir("/proc/self/fd")))
    free = (number for number in range(10_000) if number not in taken)
    return next(number for index, number in enumerate(free) if index == spare) + 1


def test_the_zygotes_death_while_ranks_are_replaced_is_reported_quickly():
    with running_pool(2) as (pool, engine):
        os.kill(engine.pids[1], signal.SIGKILL)
        assert wait_for(lambda: not _is_alive(engine.pids.get(1, 0)))
        run_code(pool, REDUCE)
        os.kill(engine.zygote_pid, signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(PoolError, match="forked from is gone"):
            run_code(pool, REDUCE)
        assert pool.state == "failed"
        assert pool.replace_dead() == {0, 1}
        assert time.monotonic() - started < 20


def test_a_rank_that_cannot_be_reached_counts_as_dead():
    with running_pool(2) as (pool, engine):
        os.kill(engine.pids[1], signal.SIGKILL)
        assert wait_for(lambda: any(isinstance(item, WorkerEnded) for item in engine.poll(0.01))), (
            "heard by nobody else"
        )
        answers, _ = run_code(pool, REDUCE)
        assert [answer.rank for answer in answers if answer.outcome == "died"] == [1]
        assert results(pool) == HEALTHY


def test_an_interrupt_while_workers_start_gives_the_prompt_back():
    with running_pool(2) as (pool, _):
        run_code(pool, "import os; os._exit(1)", "pass")
        with pytest.raises(KeyboardInterrupt):
            pool.wait_ready(num_interrupts=lambda: 1)
        assert pool.state == "failed"
