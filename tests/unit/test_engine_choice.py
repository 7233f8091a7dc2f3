"""Engines of other packages, and what a pool does when an engine loses a node."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from accel_nb.config import Layer, parse_flags, resolve
from accel_nb.errors import ConfigError, PoolError, WorkerDied
from accel_nb.notebook.messages import read_answer
from accel_nb.notebook.session.error_translation import error_from_answers
from accel_nb.pool.device_assignment import assign_workers
from accel_nb.pool.engine import (
    Arrival,
    EngineFacts,
    EngineRequest,
    NodeLost,
    RecordArrived,
    WorkerEnded,
    WorkerSpec,
    ranks_of_node,
)
from accel_nb.pool.messages import Reply, TaskRequest, WorkerReady
from accel_nb.pool.nodes import agent_engine
from accel_nb.pool.nodes.host import own_versions
from accel_nb.pool.nodes.ray_engine import check_versions, start_ray_engine
from accel_nb.pool.payload import NO_PAYLOADS, MemoryPayloads, Payloads
from accel_nb.pool.pool import Pool
from accel_nb.pool.registry import find_engine
from tests.support.pools import Recorder

SPECS = [WorkerSpec("cpu", 1, node=node) for node in (0, 0, 1, 1)]
REASON = "node far has not answered for 2.1 s"


class TwoNodes:
    """Ranks in memory on two nodes; node 1 is lost when a request reaches rank 3, or when a test calls `lose`."""

    def __init__(self) -> None:
        self.payloads = MemoryPayloads()
        self.arrivals: list[Arrival] = []
        self.is_lost = False

    def lose(self) -> None:
        self.is_lost = True
        self.arrivals.append(NodeLost(1, (2, 3), REASON))

    def facts(self) -> EngineFacts:
        return EngineFacts(True, 1, {}, {}, None, ("near", "far"), {1: REASON} if self.is_lost else {})

    def refresh(self) -> None:
        pass

    def start(self, specs: Sequence[WorkerSpec]) -> None:
        self.arrivals = [RecordArrived(rank, WorkerReady(rank, rank)) for rank in range(len(specs))]

    def send(self, rank: int, record: object, payloads: Payloads = NO_PAYLOADS, *, urgent: bool = False) -> bool:
        if rank == 3 and not self.is_lost:
            self.lose()
        elif rank < 2 and isinstance(record, TaskRequest):
            self.arrivals.append(RecordArrived(rank, Reply(record.number, "done", {})))
        return not self.is_lost or rank < 2

    def poll(self, timeout_s: float) -> list[Arrival]:
        arrived, self.arrivals = self.arrivals, []
        return arrived

    def kill(self, rank: int) -> None:
        raise AssertionError("nothing is to be killed")

    def replace(self, ranks: Sequence[int]) -> Payloads:
        raise PoolError(REASON)

    def stop(self) -> None:
        pass


@pytest.fixture
def engine() -> TwoNodes:
    return TwoNodes()


@pytest.fixture
def pool(engine: TwoNodes) -> Pool:
    pool = Pool(engine, SPECS)
    pool.wait_ready()
    return pool


def test_a_lost_node_ends_the_request_and_names_what_was_lost(pool, engine):
    results, reason = pool.run("run", {rank: {} for rank in range(4)}, Recorder())
    assert reason == "death"
    assert sorted(result.rank for result in results if result.outcome == "died") == [2, 3]
    assert pool.state == "failed", "its ranks cannot be replaced"
    error = error_from_answers([read_answer(result) for result in results if result.death], reason, {}, None)
    assert isinstance(error, WorkerDied)
    assert f"{REASON}, and ranks 2 and 3 with it" in str(error)
    smaller = Pool(engine, SPECS[:2])
    smaller.wait_ready()
    assert smaller.state == "ready"


def test_a_node_that_is_lost_between_requests_takes_the_pool_with_it(pool, engine):
    engine.lose()
    assert pool.replace_dead() == {0, 1, 2, 3}
    assert pool.state == "failed"


def test_a_node_that_is_lost_while_ranks_start_is_an_error(engine):
    pool = Pool(engine, SPECS)
    engine.arrivals.clear()
    engine.lose()
    with pytest.raises(PoolError, match=f"{REASON}, while its ranks started"):
        pool.wait_ready()


class OneDies(TwoNodes):
    """Rank 3 dies in a request and is replaced; rank 0 cannot open the new process group. No process can be killed."""

    def send(self, rank: int, record: object, payloads: Payloads = NO_PAYLOADS, *, urgent: bool = False) -> bool:
        if isinstance(record, TaskRequest) and record.task == "reopen" and rank == 0:
            error = {"type": "RuntimeError", "message": "no address", "traceback": ["..."], "pickled": "gASV"}
            self.arrivals.append(RecordArrived(rank, Reply(record.number, "raised", {"error": error})))
        elif isinstance(record, TaskRequest):
            self.arrivals.append(
                WorkerEnded(rank, -9) if rank == 3 else RecordArrived(rank, Reply(record.number, "done", {}))
            )
        return True

    def kill(self, rank: int) -> None:
        pass

    def replace(self, ranks: Sequence[int]) -> Payloads:
        return NO_PAYLOADS


def test_a_rank_that_cannot_rejoin_is_reported_by_type_and_message():
    pool = Pool(OneDies(), SPECS)
    pool.wait_ready()
    pool.run("run", {rank: {} for rank in range(4)}, Recorder())
    with pytest.raises(PoolError, match="rank 0 could not join the new process group: RuntimeError: no address;"):
        pool.wait_ready()


def test_ranks_that_do_not_end_are_named_when_the_time_is_over():
    engine = OneDies()
    pool = Pool(engine, SPECS)
    engine.arrivals = [WorkerEnded(1, -9)]
    with pytest.raises(PoolError, match="ranks 0, 2, 3 did not become ready"):
        pool.wait_ready(timeout_s=0.0)


def request(flags: str) -> EngineRequest:
    options = resolve([parse_flags(f"--engine ray --nodes 2 --cpus 1 {flags}", "%%accelerate")]).config.engine
    return EngineRequest("program:Program", (), options)


def test_ray_is_refused_where_it_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r'not installed here; pip install "accel_nb\[ray\]"'):
        start_ray_engine(request(""))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--engine.address ray://head:10001", "Ray Client is too slow"),
        ("--engine.address head:6379", "joined without a token"),
    ],
)
def test_ray_is_refused_before_it_is_joined(monkeypatch, flags, message):
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    with pytest.raises(ConfigError, match=message):
        start_ray_engine(request(flags))


def test_a_node_with_another_version_is_refused_with_the_remedy():
    other = own_versions() | {"torch": "2.0.0"}
    ray = SimpleNamespace(get=lambda result, timeout: result, exceptions=SimpleNamespace(GetTimeoutError=TimeoutError))
    actor = SimpleNamespace(versions=SimpleNamespace(remote=lambda: json.dumps(other)))
    torch = re.escape(own_versions()["torch"])
    with pytest.raises(
        ConfigError, match=rf"node far has torch 2.0.0 instead of {torch}; .* pip install torch=={torch}"
    ):
        check_versions(ray, [actor], [{"NodeManagerAddress": "far"}])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--nodes 2 --cpus 2", "engine.nodes.*the local engine runs on this machine only"),
        ("--engine ray", "give the workers of each node as --gpus N or --cpus N"),
    ],
)
def test_options_that_contradict_each_other_are_refused(flags, message):
    with pytest.raises(ConfigError, match=message):
        resolve([parse_flags(flags, "%%accelerate")])


def test_workers_of_several_nodes_are_assigned_without_the_lost_ones():
    config = resolve([parse_flags("--engine ray --nodes 3 --gpus 2", "%%accelerate")]).config
    specs = assign_workers(config, lost={1})
    assert [(spec.device, spec.node) for spec in specs] == [("cuda:0", 0), ("cuda:1", 0), ("cuda:0", 2), ("cuda:1", 2)]


def test_local_ranks_count_on_each_node():
    specs = [WorkerSpec("cpu", 1, node) for node in (0, 1, 0, 1)]
    assert ranks_of_node(specs, 1) == [1, 3]


def test_an_engine_that_is_not_installed_is_refused():
    with pytest.raises(ConfigError, match=r"engine 'moon' is unknown; installed are .*local"):
        find_engine("moon")


ENGINE = """
def start(request):
    print(request.program, dict(request.overrides), request.options.kind)
    return "an engine"
"""
USE = """
from accel_nb.config import Layer, parse_flags, resolve
from accel_nb.notebook.session.engines import start_engine
options = resolve([parse_flags("--engine elsewhere --cpus 1", "%%accelerate")]).config.engine
print(start_engine(options, {"A": "b"}))
"""


def test_a_package_adds_an_engine(tmp_path: Path):
    facts = tmp_path / "elsewhere-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[accel_nb.engines]\nelsewhere = elsewhere_engine:start\n")
    (tmp_path / "elsewhere_engine.py").write_text(ENGINE)
    command: list[Any] = [sys.executable, "-c", f"import sys\nsys.path.append({str(tmp_path)!r})\n{USE}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "accel_nb.notebook.worker.program:CellProgram {'A': 'b'} elsewhere\nan engine\n"


def test_a_notebook_cannot_allow_a_cluster_without_a_token() -> None:
    values = {"engine": {"insecure": True}}
    with pytest.raises(ConfigError, match="a notebook may come from someone else"):
        resolve([Layer("notebook", values, "this notebook's settings")])
    assert resolve([Layer("flags", values, "%%accelerate")]).config.engine.insecure


def test_a_command_that_does_not_end_is_a_config_error(monkeypatch):
    monkeypatch.setattr(agent_engine, "START_TIMEOUT_S", 0.01)
    with pytest.raises(ConfigError, match=r"`cat /dev/zero` did not end within 0.01 s; run it in a terminal"):
        agent_engine.run_command(["cat", "/dev/zero"])
