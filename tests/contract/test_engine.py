"""What a pool may expect of an engine: the same suite over the local engine, one that has only pipes, and two nodes.

The nodes are on the kernel's machine too; ``nodes`` send all bytes, as from another machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from accel_nb.pool.engine import Engine, WorkerEnded, WorkerSpec
from accel_nb.pool.local.engine import LocalEngine
from accel_nb.pool.payload import BufferPayload, RegionPayload, close_all, find_payload
from accel_nb.pool.pool import Pool
from accel_nb.telemetry.events import StepDone
from tests.support.agents import two_agents
from tests.support.pipe_engine import PipeEngine
from tests.support.pools import PRELOAD, PROGRAM, Recorder, run_code

ONE_NODE = [WorkerSpec("cpu", 1)] * 2
TWO_NODES = [WorkerSpec("cpu", 1, node=0), WorkerSpec("cpu", 1, node=1)]
ENGINES: dict[str, Callable[[], Engine]] = {
    "local": lambda: LocalEngine(PROGRAM, preload=PRELOAD),
    "pipes": lambda: PipeEngine(PROGRAM),
    "nodes": lambda: two_agents(PROGRAM, PRELOAD),
    "local nodes": lambda: two_agents(PROGRAM, PRELOAD, is_local=True),
}


@pytest.fixture(params=ENGINES, scope="module")
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def make_engine(kind: str) -> Callable[[], Engine]:
    return ENGINES[kind]


@pytest.fixture(scope="module")
def specs(kind: str) -> list[WorkerSpec]:
    return TWO_NODES if "nodes" in kind else ONE_NODE


@pytest.fixture(scope="module")
def engine(make_engine: Callable[[], Engine]) -> Iterator[Engine]:
    engine = make_engine()
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def pool(engine: Engine, specs: list[WorkerSpec]) -> Iterator[Pool]:
    pool = Pool(engine, specs)
    pool.wait_ready()
    yield pool
    pool.detach()


def results(pool: Pool, code: str) -> list[Any]:
    answers, reason = run_code(pool, code)
    assert reason is None
    return [answer.body["result"] for answer in sorted(answers, key=lambda answer: answer.rank)]


def test_each_spec_becomes_a_process(pool, engine):
    pids = results(pool, "import os\nresult = os.getpid()")
    assert dict(enumerate(pids)) == dict(engine.facts().pids)
    assert engine.facts().is_warm


@pytest.mark.parametrize("size", [0, 10, 3_000_000])
def test_payloads_arrive_whole_on_each_rank_and_stay_the_senders(pool, size):
    payload = pool.payloads.write(b"header", [memoryview(b"x" * size), memoryview(b"yz")])
    code = (
        "header, buffers = received['data'].read()\n"
        "buffers[1][0] = 65\n"
        "result = [header.decode(), len(buffers[0]), bytes(buffers[0][-3:]).decode(), bytes(buffers[1]).decode()]"
    )
    bodies = {rank: {"code": code} for rank in range(2)}
    for _ in range(2):
        answers, _ = pool.run("run", bodies, Recorder(), payloads={"data": payload})
        assert [answer.body["result"] for answer in answers] == [["header", size, "x" * min(size, 3), "Az"]] * 2
    assert bytes(payload.read()[1][1]) == b"yz", "what a receiver writes is its own"
    payload.close()


def test_results_carry_payloads(pool):
    code = "returned = {'data': worker.payloads.write(b'header', [memoryview(b'x' * 2_000_000)])}"
    answers, _ = run_code(pool, code)
    for answer in answers:
        payload = find_payload(answer.payloads, "data", BufferPayload)
        assert payload is not None
        header, [buffer] = payload.read()
        close_all(answer.payloads.values())
        assert (header, len(buffer)) == (b"header", 2_000_000)
        buffer[0] = 1


@pytest.mark.parametrize("num_bytes", [100, 2_000_000])
def test_a_region_is_filled_again_and_again(pool, num_bytes):
    code = (
        f"if {num_bytes} not in globals().setdefault('regions', dict()):\n"
        f"    regions[{num_bytes}] = worker.payloads.reserve({num_bytes})\n"
        f"region = regions[{num_bytes}]\n"
        "region.memory[:3] = text\n"
        f"returned = {{'region': region.share({num_bytes})}}"
    )
    for text in (b"abc", b"def"):
        answers, _ = run_code(pool, f"text = {text!r}\n{code}")
        for answer in answers:
            region = find_payload(answer.payloads, "region", RegionPayload)
            assert region is not None
            assert region.num_bytes >= num_bytes
            assert bytes(region.memory[:3]) == text
            region.close()


def test_output_notes_and_events_arrive_before_the_reply(pool):
    recorder = Recorder()
    code = (
        "import sys\n"
        "from accel_nb.telemetry.events import StepDone\n"
        "print('out')\nprint('err', file=sys.stderr)\n"
        "worker.send_message('seen', {'value': 1})\n"
        "worker.emit(StepDone(0, 1, 0.0, 0.5, 0.1, 0.01, 4))"
    )
    run_code(pool, code, recorder=recorder)
    for rank in range(2):
        assert recorder.text[rank, "stdout"] == b"out\n"
        assert recorder.text[rank, "stderr"] == b"err\n"
    assert sorted(recorder.messages) == [(rank, "seen", {"value": 1}) for rank in range(2)]
    assert recorder.events == [StepDone(0, 1, 0.0, 0.5, 0.1, 0.01, 4)] * 2


def test_an_error_is_the_reply_of_its_rank(pool):
    answers, reason = run_code(pool, "result = 1", "1 / 0")
    assert reason in (None, "failure")
    error = next(answer for answer in answers if answer.rank == 1)
    assert (error.outcome, error.body["error"]["type"]) == ("raised", "ZeroDivisionError")


def test_an_interrupt_ends_the_code_and_the_state_survives(pool, engine):
    results(pool, "kept = 5\nresult = 0")
    pids, waits = dict(engine.facts().pids), iter(range(1000))
    answers, reason = run_code(pool, "import time\ntime.sleep(100)", num_interrupts=lambda: int(next(waits) > 5))
    assert reason == "interrupt"
    assert {answer.outcome for answer in answers} == {"interrupted"}
    assert results(pool, "result = kept") == [5, 5]
    assert dict(engine.facts().pids) == pids


def test_workers_die_and_start_again_and_end_with_the_engine(make_engine, specs):
    engine = make_engine()
    try:
        pool = Pool(engine, specs)
        pool.wait_ready()
        before = dict(engine.facts().pids)
        answers, reason = run_code(pool, "import time\ntime.sleep(100)", "import os\nos.kill(os.getpid(), 9)")
        assert reason == "death"
        death = next(answer for answer in answers if answer.rank == 1)
        assert (death.outcome, death.death.code, death.death.is_killed) == ("died", -9, False)
        assert results(pool, "result = 1") == [1, 1]
        assert engine.facts().pids[1] != before[1]
        pool.detach()

        before = dict(engine.facts().pids)
        Pool(engine, specs).wait_ready()
        assert not set(before.values()) & set(engine.facts().pids.values()), "start replaces all workers"
        engine.kill(1)
        arrivals: list[Any] = []
        while not any(isinstance(arrival, WorkerEnded) for arrival in arrivals):
            arrivals += engine.poll(5)
        (ended,) = [arrival for arrival in arrivals if isinstance(arrival, WorkerEnded)]
        assert (ended.rank, ended.code) == (1, -9)
    finally:
        engine.stop()
        engine.stop()
