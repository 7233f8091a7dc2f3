"""A prepared model trains bit by bit as one that torch's own DistributedDataParallel holds."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accel_nb.accelerator import Accelerator
from accel_nb.runtime import torch_private
from accel_nb.runtime.distributed.process_group import DefaultGroup
from accel_nb.runtime.world import World
from accel_nb.strategies.ddp.lean_ddp import LeanDdp
from tests.ranks.launch import run_ranks

NUM_STEPS = 6


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)).double()


def _batches(rank: int) -> list[Tensor]:
    return list(torch.randn(NUM_STEPS, 2, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)))


def train_both(world: World, options: dict[str, object]) -> None:
    """Train with two micro-batches to a step, and a look at the model in evaluation mode in between."""
    theirs, model = DistributedDataParallel(_model(), gradient_as_bucket_view=True), _model()
    optimizers = [torch.optim.SGD(item.parameters(), lr=0.1, momentum=0.9) for item in (theirs, model)]
    accelerator = Accelerator(gradient_accumulation_steps=2, config={"ddp": options})
    accelerator.prepare(model, optimizers[1])
    for number, (first, second) in enumerate(_batches(world.rank)):
        for batch, is_last in ((first, False), (second, True)):
            with nullcontext() if is_last else theirs.no_sync():
                (theirs(batch).square().mean() / 2).backward()
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                optimizers[1].step()
                optimizers[1].zero_grad()
        optimizers[0].step()
        optimizers[0].zero_grad()
        own, other = model.state_dict(), theirs.module.state_dict()
        assert all(torch.equal(own[name], other[name]) for name in other), f"step {number}"
        if number == NUM_STEPS // 2:
            for item in (model, theirs):
                item.eval()
            with torch.no_grad():
                assert torch.equal(model(first), theirs.module(first))
            for item in (model, theirs):
                item.train()
    accelerator.close()


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=["short way", "torch's own way"])
def test_weights_and_buffers_are_those_of_ddp(options: dict[str, object]) -> None:
    run_ranks(train_both, 2, options)


def train_on_an_unchecked_torch(world: World, options: dict[str, object]) -> None:
    torch_private.torch_version = lambda: "9.9"
    train_both(world, options)


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=["plain", "unused"])
def test_weights_are_those_of_ddp_without_private_names(options: dict[str, object]) -> None:
    run_ranks(train_on_an_unchecked_torch, 2, options)


def profile_a_step(world: World) -> bool:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator = Accelerator()
    accelerator.prepare(model, optimizer)
    batch = _batches(world.rank)[0][0]
    for _ in range(3):
        accelerator.backward(model(batch).sum())
        optimizer.step()
    with torch.profiler.profile() as profiler:
        accelerator.backward(model(batch).sum())
    names = [event.name for event in profiler.events() or ()]
    accelerator.close()
    return "DistributedDataParallel.forward" in names


def test_a_profile_shows_the_forward_pass_by_its_name() -> None:
    assert run_ranks(profile_a_step, 2) == [True, True]


class _Partly(nn.Module):
    """A layer that nothing uses beside one that is used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.unused = nn.Linear(3, 2).double(), nn.Linear(2, 2).double()

    def forward(self, batch: Tensor) -> Tensor:
        return self.used(batch)


def train_with_a_penalty(world: World, options: dict[str, object]) -> None:
    """Train with a penalty on all weights from the third step on, and without a group of processes."""
    model, plain = _Partly(), _Partly()
    optimizers = [torch.optim.SGD(item.parameters(), lr=0.1) for item in (model, plain)]
    accelerator = Accelerator(config={"ddp": options})
    accelerator.prepare(model, optimizers[0])
    shares = [_batches(rank) for rank in range(world.size)]
    for number in range(NUM_STEPS):
        weight = 0.1 if number >= 2 else 0.0
        accelerator.backward(model(shares[world.rank][number][0]).square().mean() + weight * _size(model, weight))
        means = [plain(share[number][0]).square().mean() for share in shares]
        (torch.stack(means).mean() + weight * _size(plain, weight)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    accelerator.close()


def _size(model: nn.Module, weight: float) -> Tensor | float:
    return torch.stack([value.square().sum() for value in model.parameters()]).sum() if weight else 0.0


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=["found", "declared"])
def test_a_loss_may_use_parameters_that_the_output_does_not_lead_to(options: dict[str, object]) -> None:
    run_ranks(train_with_a_penalty, 2, options)


def interrupt_between_passes(world: World) -> None:
    """Interrupt a forward pass when it has prepared the reducer, and count the messages of a run after it."""

    def train(num_steps: int) -> int:
        before = DefaultGroup.num_collectives() or 0
        for batch in _batches(world.rank)[:num_steps]:
            accelerator.backward(model(batch[0]).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return (DefaultGroup.num_collectives() or 0) - before

    def interrupt(frame: FrameType, event: str, argument: Any) -> None:
        if event == "return" and frame.f_code is LeanDdp.forward.__code__:
            sys.setprofile(None)
            raise KeyboardInterrupt

    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator = Accelerator()
    accelerator.prepare(model, optimizer)
    expected = train(2)
    sys.setprofile(interrupt)
    with pytest.raises(KeyboardInterrupt) as interrupted:
        train(1)
    accelerator.close()
    accelerator = Accelerator()
    accelerator.prepare(model, optimizer)
    assert train(2) == expected
    assert interrupted.tb  # a shell keeps the traceback too
    accelerator.close()


def test_an_interrupted_forward_pass_leaves_no_reducer() -> None:
    run_ranks(interrupt_between_passes, 2)
