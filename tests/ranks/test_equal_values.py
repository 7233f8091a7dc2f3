"""Values that a plain cell draws by itself: unseeded generators are equal on all ranks, other differences are told."""

from __future__ import annotations

import os
import random
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from accel_nb.accelerator import Accelerator
from accel_nb.accelerator.plain_cells.autoprepare import PlainCells
from accel_nb.runtime.world import World
from tests.ranks.launch import run_ranks


def in_cell(world: World, program: Callable[[int], Any], entropy: int | None) -> tuple[Any, list[str]]:
    """Run a program as a plain cell; return its result and the warnings of unequal values."""
    accelerator = Accelerator(world=world, cpu=True)
    torch.manual_seed(7)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with PlainCells(accelerator).run_cell(entropy=entropy):
            result = program(world.rank)
    accelerator.close()
    return result, [str(item.message) for item in caught if "different values" in str(item.message)]


def draws(rank: int) -> list[float]:
    found = [np.random.default_rng().random() for _ in range(2)]  # two generators of one line
    if rank == 1:  # a library draws on one rank only, as for the name of a file
        with tempfile.NamedTemporaryFile():
            found.append(np.random.RandomState().random_sample())
    else:
        found.append(np.random.RandomState().random_sample())
    found = [*found[:2], random.Random().random(), random.Random(3).random()]
    random.seed()
    np.random.seed()
    torch.seed()
    # NumPy's global generator also keeps a part of its state.
    return [*found, random.random(), torch.rand(()).item(), np.random.random()]


def draw_in_cells(world: World) -> list[list[float]]:
    return [in_cell(world, draws, entropy)[0] for entropy in (5, 5, 6)]


def test_generators_without_a_seed_draw_the_same_numbers_on_all_ranks() -> None:
    first, second = run_ranks(draw_in_cells, 2)
    assert first == second
    one, again, other = first
    assert one[:-1] == again[:-1]
    assert len({*one, *other}) == len(one) + len(other) - 1, "only the seeded generator repeats its number"


class Walk:
    """An environment with a generator of its own, which nothing seeds."""

    def __init__(self) -> None:
        self.random = np.random.default_rng()
        self.state = self.random.normal(size=4)

    def step(self, action: int) -> float:
        self.state = 0.9 * self.state + 0.1 * action + 0.1 * self.random.normal(size=4)
        return float(-np.abs(self.state).sum())


def value_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def fit(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for states, rewards in batches:
        loss = F.mse_loss(model(states).amax(1), rewards)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [value for part in model.parameters() for value in part.detach().flatten().tolist()]


def collect_and_fit(rank: int) -> tuple[list[Any], list[float]]:
    walk, model, batches = Walk(), value_net(), []
    for _ in range(6):
        states, rewards = [], []
        for _ in range(8):
            states.append(walk.state)
            with torch.no_grad():
                action = int(model(torch.as_tensor(walk.state)).argmax())
            rewards.append(walk.step(action))
        batches.append((torch.as_tensor(np.array(states)), torch.tensor(rewards, dtype=torch.float64)))
    return [(x.tolist(), y.tolist()) for x, y in batches], fit(model, batches)


def collect_in_cell(world: World) -> Any:
    return in_cell(world, collect_and_fit, 5)


def test_an_environment_without_a_seed_trains_as_on_one_device() -> None:
    first, second = run_ranks(collect_in_cell, 2)
    assert first == second
    (recorded, weights), told = first
    torch.manual_seed(7)
    batches = [(torch.as_tensor(np.array(states)), torch.as_tensor(np.array(rewards))) for states, rewards in recorded]
    expected = fit(value_net(), batches)
    assert weights == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert not told


def own_batches(number: int, first_unequal: int) -> list[tuple[Tensor, Tensor]]:
    """Return batches that are drawn from the operating system from one of them on."""
    common = torch.Generator().manual_seed(1)
    own = torch.Generator().manual_seed(int.from_bytes(os.urandom(6), "big"))
    drawn = [common if index < first_unequal else own for index in range(number)]
    return [
        (torch.randn(8, 4, generator=item, dtype=torch.float64), torch.randn(8, generator=item, dtype=torch.float64))
        for item in drawn
    ]


def unequal_at_once(rank: int) -> list[float]:
    return fit(value_net(), own_batches(4, 0))


def unequal_later(rank: int) -> list[float]:
    return fit(value_net(), own_batches(6, 2))


class OtherMethod(nn.Module):
    """A model of which only a method is called."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2).double()

    def score(self, x: Tensor) -> Tensor:
        return x @ self.inner.weight.T + self.inner.bias


def unequal_in_a_method(rank: int) -> list[float]:
    model = OtherMethod()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, _ in own_batches(3, 0):
        optimizer.zero_grad()
        model.score(x).square().mean().backward()
        optimizer.step()
    return model.inner.weight.flatten().tolist()


UNEQUAL = {"at_once": unequal_at_once, "later": unequal_later, "in_a_method": unequal_in_a_method}


def run_unequal(world: World) -> dict[str, Any]:
    return {name: in_cell(world, program, 5) for name, program in UNEQUAL.items()}


def test_ranks_that_compute_different_values_are_told_once() -> None:
    first, second = run_ranks(run_unequal, 2)
    for name, (weights, told) in first.items():
        assert len(told) == 1, name
        assert "gradients are averaged" in told[0]
        assert second[name] == (weights, []), f"{name}: the ranks keep the same weights, and rank 0 warns"
