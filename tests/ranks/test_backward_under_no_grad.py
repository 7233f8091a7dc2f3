"""A backward pass that a plain cell calls under ``no_grad``, as textbooks' trainers do, is that of one device."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn import functional as F

from accel_nb.accelerator import Accelerator
from accel_nb.accelerator.plain_cells.autoprepare import PlainCells
from accel_nb.runtime.world import World
from tests.ranks.launch import run_ranks
from tests.ranks.recorded_run import loader, mlp, sgd


def train() -> list[float]:
    torch.manual_seed(7)
    model = mlp()
    optimizer = sgd(model)
    for x, y, _ in loader(shuffle=True):
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        with torch.no_grad():
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        assert torch.is_grad_enabled()
    return torch.cat([value.detach().flatten() for value in model.parameters()]).tolist()


def on_workers(world: World, divide: str) -> list[float]:
    accelerator = Accelerator(world=world, cpu=True, config={"divide": divide})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with PlainCells(accelerator).run_cell():
            weights = train()
    accelerator.close()
    return weights


@pytest.mark.parametrize("divide", ["data", "model"])
def test_a_backward_pass_under_no_grad_is_that_of_one_device(divide: str) -> None:
    first, second = run_ranks(on_workers, 2, divide, timeout_s=60)
    assert first == second == pytest.approx(train(), rel=1e-9, abs=1e-12)
