"""A plain cell that changes the dtype of a model between two loops trains as one device does."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn import functional as F

from accel_nb.accelerator import Accelerator
from accel_nb.accelerator.plain_cells.autoprepare import PlainCells
from accel_nb.runtime.world import World
from tests.ranks.launch import run_ranks
from tests.ranks.recorded_run import loader, mlp


def train() -> list[float]:
    torch.manual_seed(7)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for dtype in (torch.float64, torch.float32):
        model.to(dtype)
        for x, y, _ in loader():
            optimizer.zero_grad()
            F.mse_loss(model(x.to(dtype)), y.to(dtype)).backward()
            optimizer.step()
    assert {value.dtype for value in model.parameters()} == {torch.float32}
    return torch.cat([value.detach().flatten() for value in model.parameters()]).tolist()


def on_workers(world: World) -> list[float]:
    accelerator = Accelerator(world=world, cpu=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with PlainCells(accelerator).run_cell():
            weights = train()
    accelerator.close()
    return weights


def test_a_model_that_changes_its_dtype_in_a_cell_trains_as_on_one_device() -> None:
    first, second = run_ranks(on_workers, 2, timeout_s=60)
    assert first == second == pytest.approx(train(), abs=1e-6)
