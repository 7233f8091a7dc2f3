"""Changes of the structure of models and optimizers: the notebook's objects stay those to which others refer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.unit.test_namespace_sync import Sides


@pytest.fixture(name="both")
def _both():
    both = Sides()
    yield both
    both.close()


def test_a_group_that_a_cell_adds_is_added_to_the_optimizer_that_is_here(both):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.Adam(model[1].parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    both.kernel.update(model=model, optimizer=optimizer, scheduler=scheduler, holder=[optimizer])
    both.ship("model", "optimizer", "scheduler", "holder")
    before = both.snapshot("model", "optimizer", "scheduler", "holder")
    there = both.worker["optimizer"]
    there.add_param_group({"params": both.worker["model"][0].parameters(), "lr": 0.2})
    both.worker["model"](torch.ones(1, 2)).sum().backward()
    there.step()
    assert both.bring_back(before) == {}
    assert both.kernel["optimizer"] is scheduler.optimizer is both.kernel["holder"][0] is optimizer
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    assert all(one is two for one, two in zip(optimizer.param_groups[1]["params"], model[0].parameters(), strict=True))
    assert torch.equal(
        optimizer.state[model[0].weight]["exp_avg"], there.state[both.worker["model"][0].weight]["exp_avg"]
    )
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_groups_that_a_cell_removes_are_removed_here(both):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD([{"params": part.parameters()} for part in model], lr=0.1)
    both.kernel.update(model=model, optimizer=optimizer)
    both.ship("model", "optimizer")
    before = both.snapshot("model", "optimizer")
    del both.worker["optimizer"].param_groups[1]
    both.bring_back(before)
    assert both.kernel["optimizer"] is optimizer
    assert [len(group["params"]) for group in optimizer.param_groups] == [2]
