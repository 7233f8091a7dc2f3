"""Memory that runs out on one rank, while the others are where they like: all try again together."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_nb import find_executable_batch_size
from accel_nb.accelerator import Accelerator
from accel_nb.errors import MisuseError
from accel_nb.runtime.world import World
from tests.ranks.launch import RankError, run_ranks


def train(world: World, batch_size: int, fails: bool, where: str) -> tuple[int, list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator = Accelerator(world=world, cpu=True)
    if where == "before" and fails:
        torch.empty(2**50)
    accelerator.prepare(model, optimizer)
    for number in range(3):
        x = torch.randn(batch_size, 3, generator=torch.Generator().manual_seed(10 * number + world.rank))
        loss = model(x).square().mean()
        if fails and number == 1 and where == "forward":
            torch.empty(2**50)
        if fails and number == 1 and where == "backward":
            loss.register_hook(lambda _: torch.empty(2**50))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if where == "after" and fails:
        torch.empty(2**50)
    accelerator.close()
    return batch_size, torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def retries(world: World, unlucky: list[int], where: str, path: str) -> list[Any]:
    handler = logging.FileHandler(path)
    logger = logging.getLogger("accel_nb.accelerator.training.batch_size")
    logger.addHandler(handler)
    found = find_executable_batch_size(
        lambda batch_size: train(world, batch_size, batch_size > 4 and world.rank in unlucky, where), 16
    )()
    again = find_executable_batch_size(
        lambda batch_size: train(world, batch_size, batch_size > 4 and world.is_last, where), 8
    )()
    plain = train(world, 4, False, where)
    accelerator = Accelerator(world=world, cpu=True)
    gathered = accelerator.gather(torch.tensor(world.rank)).tolist()
    accelerator.close()
    logger.removeHandler(handler)
    return [found, again, plain, gathered]


PLACES = ("before", "forward", "backward", "after")


def retries_everywhere(world: World, unlucky: list[int], folder: str) -> list[list[Any]]:
    return [retries(world, unlucky, where, f"{folder}/{where}") for where in PLACES]


@pytest.mark.parametrize(("size", "unlucky"), [(2, [1]), (3, [0]), (3, [0, 1, 2])])
def test_all_ranks_try_again_when_memory_runs_out_on_any(size: int, unlucky: list[int], tmp_path: Path) -> None:
    per_rank = run_ranks(retries_everywhere, size, unlucky, str(tmp_path))
    ranks = f"rank{'s' if len(unlucky) > 1 else ''} {', '.join(map(str, unlucky))}"
    for where, *results in zip(PLACES, *per_rank, strict=True):
        for found, again, plain, gathered in results:
            assert found == again == plain == results[0][0], where
            assert found[0] == 4
            assert gathered == list(range(size))
        lines = (tmp_path / where).read_text().splitlines()
        assert lines[:2] == [
            f"<lambda>: batch size {tried} ran out of memory on {ranks}, trying {tried // 2}" for tried in (16, 8)
        ]
        assert len(lines) == 3, where


def gives_up(world: World) -> str:
    try:
        find_executable_batch_size(lambda batch_size: train(world, batch_size, world.rank == 1, "forward"), 2)()
    except MisuseError as error:
        return str(error)
    return ""


def test_all_ranks_give_up_together() -> None:
    for message in run_ranks(gives_up, 2):
        assert "out of memory on rank 1 with a batch size of 1" in message


def raises(world: World) -> None:
    def fail(batch_size: int) -> None:
        if world.rank == 1:
            raise KeyError("mine")
        train(world, batch_size, False, "")

    find_executable_batch_size(fail, 2)()


def test_other_errors_of_one_rank_stay_what_they_are() -> None:
    with pytest.raises(RankError, match="KeyError: 'mine'"):
        run_ranks(raises, 2)
