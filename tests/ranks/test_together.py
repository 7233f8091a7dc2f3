"""What ranks agree on beside tensors: flags, random states, log lines, parts of an input."""

from __future__ import annotations

import logging
import os
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from accel_nb import get_logger, set_seed, synchronize_rng_states
from accel_nb.accelerator import Accelerator
from accel_nb.launch.stall_reporter import StallComparer, StallReporter
from accel_nb.runtime.distributed.communicator import TorchComm
from accel_nb.runtime.distributed.process_group import DefaultGroup
from accel_nb.runtime.world import World
from tests.conftest import wait_for
from tests.ranks.launch import run_ranks


def triggers(world: World) -> list[list[bool]]:
    accelerator = Accelerator(world=world)
    plain = []
    for check in range(6):
        if check in (2, 4) and world.rank == check // 2 - 1:
            accelerator.set_trigger()
        plain.append(accelerator.check_trigger())
    late = []
    for check in range(6):
        if check == 2 and world.is_last:
            accelerator.set_trigger()
        late.append(accelerator.check_trigger(wait=False))
    accelerator.set_trigger()
    late.append(accelerator.check_trigger(wait=False))
    late.append(accelerator.check_trigger())  # sees what the one before has started
    late.append(accelerator.check_trigger())
    return [plain, late]


@pytest.mark.parametrize("size", [2, 3])
def test_a_trigger_is_seen_by_all_ranks_at_the_same_check_and_once(size: int) -> None:
    for plain, late in run_ranks(triggers, size):
        assert plain == [False, False, True, False, True, False]
        assert late == [False, False, False, True, False, False, False, True, False]


def stops_early(world: World) -> int:
    """Rank 1 decides alone, in the middle of training; the others must leave in the same step."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator = Accelerator(world=world)
    accelerator.prepare(model, optimizer)
    for step in range(100):
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        optimizer.zero_grad()
        if world.rank == 1 and step == 3:
            accelerator.set_trigger()
        if accelerator.check_trigger(wait=False):
            return step
    return -1


def test_training_stops_in_the_same_step_everywhere() -> None:
    assert run_ranks(stops_early, 2) == [4, 4]


def draws(world: World) -> dict[str, Any]:
    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    facts: dict[str, Any] = {}
    set_seed(5)
    facts["same"] = draw()
    set_seed(5, device_specific=True)
    facts["own"] = draw()
    synchronize_rng_states(["torch", "python"])
    facts["two shared"] = draw()
    synchronize_rng_states()
    generator = torch.Generator().manual_seed(world.rank)
    synchronize_rng_states(["numpy", "python", "torch", "generator"], generator)
    facts["shared"] = [*draw(), float(torch.rand((), generator=generator))]
    return facts


def test_random_states_are_derived_and_shared() -> None:
    first, second = run_ranks(draws, 2)
    assert first["same"] == second["same"] == first["own"]
    assert all(one != other for one, other in zip(first["own"], second["own"], strict=True))
    assert [a == b for a, b in zip(first["two shared"], second["two shared"], strict=True)] == [True, False, True]
    assert first["shared"] == second["shared"]


def logs(world: World, path: str) -> None:
    handler = logging.FileHandler(path)
    logger = get_logger("tests.order", "INFO")
    logger.logger.addHandler(handler)
    for number in range(3):
        logger.info("line %d", number, in_order=True)
        logger.info("main %d", number)


def test_messages_in_order_come_rank_by_rank(tmp_path: Any) -> None:
    path = tmp_path / "log"
    run_ranks(logs, 3, str(path))
    lines = [line for line in path.read_text().splitlines() if "line" in line]
    assert lines == [f"[rank {rank}] line {number}" for number in range(3) for rank in range(3)]
    assert path.read_text().count("main") == 3


def parts(world: World, folder: str) -> tuple[list[int], list[int], list[str]]:
    accelerator = Accelerator(world=world)
    with accelerator.split_between_processes([1, 2, 3]) as some, accelerator.split_between_processes((7,)) as few:
        found = accelerator.gather_object(some), accelerator.gather_object(list(few))
    with accelerator.profile(folder, activities=["cpu"]):
        torch.ones(2).sum()
    import os

    return (*found, sorted(os.listdir(folder)))


def test_inputs_are_divided_and_each_rank_leaves_a_trace(tmp_path: Any) -> None:
    expected = ([1, 2, 3], [7], ["trace_rank0.json", "trace_rank1.json"])
    assert run_ranks(parts, 2, str(tmp_path)) == [expected] * 2


def stand_apart(world: World, folder: Path) -> list[str]:
    files = {rank: os.open(folder / str(rank), os.O_RDWR | os.O_CREAT) for rank in range(world.size)}
    comm = TorchComm(world, DefaultGroup.adopt(world))
    comm.barrier()
    teller, is_compared = StallReporter(files[world.rank], world), threading.Event()
    lines: list[str] = []

    def look() -> None:
        def all_have_reported() -> bool:
            teller.sample()
            return all(os.pread(file, 1, 0) == b"{" for file in files.values())

        wait_for(all_have_reported)
        StallComparer(files, lines.append).compare(files.keys())
        is_compared.set()

    looking = threading.Thread(target=look)
    looking.start()
    if world.rank == 1:
        is_compared.wait(30)  # the branch that only this rank takes
    comm.all_gather(torch.ones(1))
    looking.join()
    return lines if DefaultGroup.adopt(world).last_collective() is not None else ["no record"]


def test_a_launch_says_which_rank_the_others_wait_for(tmp_path: Path) -> None:
    (line,) = run_ranks(stand_apart, 2, tmp_path)[1]
    if line == "no record":
        pytest.skip("this version of torch records no collectives of gloo")
    assert line.startswith("no rank makes progress: rank 0 waits in")
    assert "for rank 1, which is at line" in line
    assert "is_compared.wait(30)" in line
