"""Checkpoints on a server of the S3 protocol that fails: the manifest comes last, and the newest complete one loads."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from accel_nb.checkpoint.background_save import CheckpointSaver
from accel_nb.checkpoint.layout import format_step_name
from accel_nb.checkpoint.load import materialize, open_checkpoint
from accel_nb.checkpoint.manifest import CheckpointOrigin
from accel_nb.checkpoint.store_url import open_store
from accel_nb.errors import CheckpointError
from accel_nb.runtime.distributed.communicator import Communicator, LocalComm, TorchComm
from accel_nb.runtime.distributed.process_group import DefaultGroup
from accel_nb.runtime.world import World
from tests.ranks.launch import RankError, run_ranks
from tests.support.nightly import nightly
from tests.support.s3 import Server, connected, running_server

BUCKET = "runs"


@pytest.fixture(scope="module")
def s3() -> Iterator[Server]:
    with running_server(BUCKET) as server:
        yield server


@pytest.fixture
def server(s3: Server) -> Iterator[Server]:
    s3.rule = lambda name: None
    s3.written.clear()
    s3.held.clear()
    s3.release.clear()
    yield s3
    s3.rule = lambda name: None
    s3.release.set()


def comm_of(world: World) -> Communicator:
    return LocalComm() if world.size == 1 else TorchComm(world, DefaultGroup.adopt(world))


def tree_of(step: int) -> dict[str, Any]:
    return {"step": step, **{name: torch.full((40_000,), float(step)) for name in ("weights", "momentum")}}


def save(world: World, endpoint: str, url: str, steps: list[int], is_blocking: bool) -> list[str]:
    """Save each step and return what went wrong."""
    problems: list[str] = []
    with connected(endpoint):
        saver = CheckpointSaver(comm_of(world), torch.device("cpu"))
        for step in steps:
            facts = CheckpointOrigin(run="r", step=step, world_size=world.size, strategy="single")
            try:
                saver.save(open_store(url), format_step_name(step), tree_of(step), facts, blocking=is_blocking, keep=2)
                saver.wait()
            except CheckpointError as error:
                problems.append(str(error))
        saver.close()
    return problems


def load(world: World, endpoint: str, url: str) -> tuple[int, list[str]]:
    """Load the newest checkpoint, which must be of one step, and return the step and what was passed over."""
    with connected(endpoint):
        checkpoint = open_checkpoint(url, comm_of(world))
        found = materialize(checkpoint.read_tree())
        assert {found["step"]} == set(found["weights"].tolist()) == set(found["momentum"].tolist())
        return found["step"], checkpoint.skipped


@pytest.mark.parametrize("is_blocking", [True, nightly(False)])
def test_any_number_of_ranks_loads_what_any_number_saved(server: Server, is_blocking: bool) -> None:
    url = f"s3://{BUCKET}/whole-{is_blocking}"
    assert run_ranks(save, 2, server.url, url, [1, 2, 3], is_blocking) == [[], []]
    first = server.written[: server.written.index("manifest.json")]
    # In the background ranks cannot communicate: what the others have written is reported through the store.
    reported = [] if is_blocking else ["part"]
    kinds = sorted(name.partition("-")[0] for name in first)
    assert kinds == [*reported, "state", "tensors", "tensors"], "the manifest is last"
    assert run_ranks(load, 3, server.url, url) == [(3, [])] * 3
    with connected(server.url) as fs:
        names = {path.rsplit("/", 1)[-1] for path in fs.ls(url.removeprefix("s3://"))}
    assert names == {"latest", "step_2", "step_3"}, "two are kept"


@pytest.mark.parametrize(
    ("what", "fault"),
    [
        ("tensors-", "cut"),
        ("manifest.json", "refuse"),
        pytest.param("tensors-", "refuse", marks=pytest.mark.nightly),
        pytest.param("manifest.json", "cut", marks=pytest.mark.nightly),
    ],
)
def test_a_write_that_fails_leaves_the_newest_complete_one(server: Server, what: str, fault: Any) -> None:
    url = f"s3://{BUCKET}/{fault}-{what}"
    assert run_ranks(save, 1, server.url, url, [1], True) == [[]]
    server.rule = lambda name: fault if name.startswith(what) else None
    (problems,) = run_ranks(save, 1, server.url, url, [2], True)
    assert len(problems) == 1
    assert "step_2 was not saved" in problems[0]
    assert run_ranks(load, 1, server.url, url) == [(1, [])]
    server.rule = lambda name: None
    assert run_ranks(save, 1, server.url, url, [3], True) == [[]]
    assert run_ranks(load, 1, server.url, url) == [(3, [])]


@pytest.mark.parametrize("is_blocking", [True, nightly(False)])
def test_what_one_rank_cannot_write_is_reported_on_all_ranks(server: Server, is_blocking: bool) -> None:
    url = f"s3://{BUCKET}/one-rank-{is_blocking}"
    assert run_ranks(save, 2, server.url, url, [1], is_blocking) == [[], []]
    server.rule = lambda name: "refuse" if name.startswith("tensors-00001") else None
    problems = run_ranks(save, 2, server.url, url, [2], is_blocking)
    assert all("step_2 was not saved; rank 1" in found[0] for found in problems)
    server.rule = lambda name: None
    assert run_ranks(save, 2, server.url, url, [3], is_blocking) == [[], []]
    assert run_ranks(load, 1, server.url, url) == [(3, [])]


def test_a_server_that_is_busy_for_a_moment_is_asked_again(server: Server) -> None:
    url = f"s3://{BUCKET}/busy"
    refused: set[str] = set()

    def once(name: str) -> Any:
        known = name in refused
        refused.add(name)
        return None if known else "busy"

    server.rule = once
    assert run_ranks(save, 1, server.url, url, [1], True) == [[]]
    assert "manifest.json" in refused
    assert run_ranks(load, 1, server.url, url) == [(1, [])]


def test_a_manifest_whose_answer_is_lost_counts(server: Server) -> None:
    url = f"s3://{BUCKET}/mute"
    server.rule = lambda name: "mute" if name == "manifest.json" else None
    assert run_ranks(save, 1, server.url, url, [1], True) == [[]]
    assert run_ranks(load, 1, server.url, url) == [(1, [])]


def train_while_slow(world: World, endpoint: str, url: str) -> list[bool]:
    """Save to a server that does not answer yet: the call returns, and `is_slow` reports it."""
    with connected(endpoint):
        saver = CheckpointSaver(comm_of(world), torch.device("cpu"))
        facts = CheckpointOrigin(run="r", step=1, world_size=1, strategy="single")
        saver.save(open_store(url), "step_1", tree_of(1), facts, blocking=False)
        reported = [saver.is_busy]
        saver.last_duration_s = 1000.0
        reported.append(saver.is_slow)
        with open_store(url)._fs.open(f"{BUCKET}/go", "wb") as go:  # type: ignore[attr-defined]
            go.write(b"")
        saver.close()
        return [*reported, saver.is_busy]


def test_a_slow_server_does_not_hold_the_training_up(server: Server) -> None:
    def rule(name: str) -> Any:
        if name == "go":
            server.held.wait(60)
            server.release.set()
            return None
        return None if server.release.is_set() else "hold"

    server.rule = rule
    url = f"s3://{BUCKET}/slow"
    assert run_ranks(train_while_slow, 1, server.url, url) == [[True, True, False]]
    assert run_ranks(load, 1, server.url, url) == [(1, [])]


def save_and_report(world: World, endpoint: str, url: str, pid_file: str, step: int) -> list[str]:
    with open(pid_file, "w") as file:
        file.write(str(os.getpid()))
    return save(world, endpoint, url, [step], is_blocking=False)


def test_a_kill_at_any_request_leaves_the_newest_complete_one(server: Server, tmp_path: Any) -> None:
    """The process dies while its n-th write is on its way, for each n."""
    url = f"s3://{BUCKET}/kill"
    run_ranks(save, 1, server.url, url, [1], True)
    num_writes, newest = len(server.written), 1
    for number in range(1, num_writes + 1):
        step = number + 1
        pid_file = tmp_path / str(step)
        seen: list[str] = []

        def rule(name: str, seen: list[str] = seen, pid_file: Any = pid_file, number: int = number) -> Any:
            seen.append(name)
            if len(seen) < number:
                return None
            os.kill(int(pid_file.read_text()), signal.SIGKILL)
            return "cut"

        server.rule = rule
        with pytest.raises(RankError):
            run_ranks(save_and_report, 1, server.url, url, str(pid_file), step)
        server.rule = lambda name: None
        ((found, passed_over),) = run_ranks(load, 1, server.url, url)
        assert passed_over == []
        assert found in (newest, step)
        newest = found
    assert newest > 1, "the last request is the name of the newest: its checkpoint is complete"
