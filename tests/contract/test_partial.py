"""Tied, frozen and added parameters, several models and several optimizers, under every installed strategy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from accel_nb.accelerator import Accelerator
from accel_nb.errors import MisuseError
from accel_nb.runtime.world import World
from tests.contract.recipes import (
    OTHER_WAYS,
    STRATEGIES,
    assert_equal_weights,
    dtype_of,
    on_smallest_world,
    tolerance,
)

NUM_STEPS = 4


@dataclass
class Case:
    """What is trained together; ``losses`` are minimized one after the other, each by the optimizers beside it."""

    models: tuple[nn.Module, ...]
    optimizers: tuple[torch.optim.Optimizer, ...]
    losses: tuple[tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...]], ...]


class Tied(nn.Module):
    """A head that is the embedding, blocks of which one is frozen, and one module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.again = self.blocks[0]
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for block in (*self.blocks, self.again):
            hidden = hidden + block(hidden)
        return self.head(hidden)


class Adapted(nn.Module):
    """A frozen layer with an added product of low rank, as LoRA trains it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def tied() -> Case:
    model = Tied().double()
    optimizer = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad], lr=0.05)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        tokens = (x * 3).long() % 7
        return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())

    return Case((model,), (optimizer,), ((loss, (0,)),))


def adapted() -> Case:
    blocks = nn.ModuleList(nn.Sequential(Adapted(nn.Linear(4, 4)), nn.Tanh()) for _ in range(2))
    model = nn.Sequential(*blocks, nn.Linear(4, 4)).double()
    model[2].requires_grad_(False)
    optimizer = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad], lr=0.05)
    return Case((model,), (optimizer,), ((lambda x, y: functional.mse_loss(model(x), y), (0,)),))


def two_models() -> Case:
    """Two models that are trained in turn, each through the other, which then stands still."""
    first, second = nn.Sequential(nn.Linear(4, 6), nn.Tanh()).double(), nn.Linear(6, 4).double()
    optimizers = (torch.optim.SGD(first.parameters(), 0.1, 0.9), torch.optim.AdamW(second.parameters(), 0.05))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(second(first(x)), y)

    return Case((first, second), optimizers, ((loss, (0, 1)), (loss, (1,)), (loss, (0,))))


def two_optimizers() -> Case:
    """One model whose parts have optimizers of their own, and an optimizer of two models."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    other = nn.Linear(4, 4).double()
    shared = [*model[2].parameters(), *other.parameters()]
    optimizers = (torch.optim.SGD(model[0].parameters(), 0.1, 0.9), torch.optim.AdamW(shared, 0.05))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(other(model(x)), y)

    return Case((model, other), optimizers, ((loss, (0, 1)), (loss, (1,)), (loss, (0,))))


CASES = {case.__name__: case for case in (tied, adapted, two_models, two_optimizers)}


REFUSED = {("deepspeed 3", "two_optimizers")}
"""What a strategy does not serve, as it says before anything is trained."""


def make(name: str, dtype: torch.dtype = torch.float64) -> Case:
    torch.manual_seed(8)
    case = CASES[name]()
    for model in case.models:
        model.to(dtype)
    return case


def data(number: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.rand(12, 4, dtype=torch.float64, generator=generator).to(dtype)
    return x, x.flip(1)


def train(case: Case, world: World, backward: Callable[[Tensor], Any]) -> None:
    dtype = next(case.models[0].parameters()).dtype
    for number in range(NUM_STEPS):
        x, y = data(number, dtype)
        for loss, stepped in case.losses:
            backward(loss(x[world.rank :: world.size], y[world.rank :: world.size]))
            for index in stepped:
                case.optimizers[index].step()
            for optimizer in case.optimizers:
                optimizer.zero_grad()


def weights_of(case: Case) -> list[dict[str, Tensor]]:
    return [{name: value.detach() for name, value in model.named_parameters()} for model in case.models]


def on_ranks(world: World, strategy: str, served: list[str]) -> dict[str, list[dict[str, Tensor]]]:
    found: dict[str, list[dict[str, Tensor]]] = {}
    for name in CASES:
        case = make(name, dtype_of(strategy))
        if name not in served:
            refused = Accelerator(world=world, cpu=True, strategy=strategy)
            with pytest.raises(MisuseError, match="stage 3"):
                refused.prepare(*case.models, *case.optimizers)
            refused.close()
            continue
        before = [value.clone() for model in case.models for value in model.parameters() if not value.requires_grad]
        accelerator = Accelerator(world=world, cpu=True, strategy=strategy)
        accelerator.prepare(*case.models, *case.optimizers)
        train(case, world, accelerator.backward)
        accelerator.close()
        after = [value for model in case.models for value in model.parameters() if not value.requires_grad]
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        found[name] = weights_of(case)
        if name == "tied":
            model: Any = case.models[0]
            assert model.head.weight is model.embed.weight
            assert model.again is model.blocks[0]
    return found


@pytest.mark.parametrize("way", [*STRATEGIES, *OTHER_WAYS])
def test_parts_of_models_train_as_in_one_process(way: str) -> None:
    strategy, served = way.partition(" ")[0], [name for name in CASES if (way, name) not in REFUSED]
    results = on_smallest_world(way, on_ranks, served)
    for name in served:
        case = make(name)
        train(case, World(), lambda loss: loss.backward())
        for found in results:
            for model, wanted in zip(found[name], weights_of(case), strict=True):
                assert_equal_weights(model, wanted, atol=tolerance(strategy, 1e-8))
