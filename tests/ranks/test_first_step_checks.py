"""What the first steps show is an error that names the parameter; what is as it should be is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accel_nb.accelerator import Accelerator
from accel_nb.errors import MisuseError
from accel_nb.runtime.world import World
from tests.ranks.launch import run_ranks


def step(model: nn.Module, optimizer: Any, *others: Any, number: int = 1, **options: Any) -> Accelerator:
    accelerator = Accelerator(cpu=True, **options)
    accelerator.prepare(model, optimizer, *others)
    for _ in range(number):
        accelerator.backward(model(torch.ones(2, 3)).square().mean())
        optimizer.step()
    return accelerator


class Stuck(torch.optim.SGD):
    """Forgets its second group."""

    def step(self, closure: Any = None) -> Any:
        kept = self.param_groups
        self.param_groups = kept[:1]
        result = super().step(closure)
        self.param_groups = kept
        return result


def test_a_parameter_that_does_not_move_is_named() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters()}]
    step(model, Stuck(groups, lr=1e-3), number=19)  # an optimizer may need several steps before its first update
    with pytest.raises(MisuseError, match=r"step 20 of Stuck left 1\.weight, 1\.bias unchanged"):
        step(model, Stuck(groups, lr=1e-3), number=20)
    step(model, Stuck(groups, lr=1e-3), number=20, config={"sentinels": False})


def test_what_cannot_move_yet_is_no_error() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: float(number))
    before = model.weight.detach().clone()
    step(model, optimizer, warm_up)  # a rate of zero
    assert torch.equal(before, model.weight)
    dead = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))
    nn.init.constant_(dead[0].bias, -1e6)
    step(dead, torch.optim.SGD(dead.parameters(), lr=0.1))


def test_equal_steps_up_and_down_are_seen_as_a_move() -> None:
    """Adam's first step moves every number by the same: bits that are summed up plainly would cancel."""
    model = nn.Linear(1, 2, bias=False)
    nn.init.constant_(model.weight, 0.75)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.125)
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model, optimizer)
    accelerator.backward((model(torch.ones(1, 1)) * torch.tensor([1.0, -1.0])).sum())
    optimizer.step()
    assert model.weight.detach().flatten().tolist() == pytest.approx([0.625, 0.875])


def test_an_optimizer_of_another_copy_of_the_model_is_an_error() -> None:
    model, other = nn.Linear(3, 1), nn.Linear(3, 1)
    with pytest.raises(MisuseError, match="steps no parameter of a prepared model"):
        step(model, torch.optim.SGD(other.parameters(), lr=0.1))


def test_a_rate_that_the_schedule_undoes_is_an_error() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    optimizer.param_groups[0]["lr"] = 0.3
    with pytest.raises(MisuseError, match=r"learning rate 0\.3, and its StepLR planned 0\.1"):
        step(model, optimizer, scheduler)


def test_a_rate_that_the_schedule_keeps_is_no_error() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    optimizer.param_groups[0]["lr"] = 0.3  # of a warm-up
    step(model, optimizer, scheduler)
    assert optimizer.param_groups[0]["lr"] == 0.3


def test_a_sparse_gradient_without_rows_is_checked() -> None:
    model = nn.EmbeddingBag(4, 2, sparse=True, mode="sum")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.empty(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)).sum())
    optimizer.step()
    accelerator.close()


def one_rank_changes_its_weights(world: World) -> str:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator = Accelerator(world=world, cpu=True)
    accelerator.prepare(model, optimizer)
    if world.rank == 1:
        with torch.no_grad():
            model[1].weight.add_(0.5)
    accelerator.backward(model(torch.ones(2, 3)).square().mean())
    try:
        optimizer.step()
    except MisuseError as error:
        return str(error)
    finally:
        accelerator.close()
    return ""


@pytest.mark.parametrize("size", [2, 3])
def test_replicas_that_differ_are_reported_on_every_rank(size: int) -> None:
    for message in run_ranks(one_rank_changes_its_weights, size):
        assert "different values of 1.weight" in message
        assert "whose sums differ by up to" in message


def test_fp16_looks_at_the_first_step_that_runs() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", config={"scaler": {"init_scale": 2.0**40}})
    accelerator.prepare(model, optimizer)
    outcomes = []
    for _ in range(40):
        accelerator.backward(model(torch.ones(2, 3)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        outcomes.append(accelerator.optimizer_step_was_skipped)
    assert outcomes[0]
    assert not outcomes[-1]
