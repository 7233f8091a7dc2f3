"""Compiled models train as plain ones, and are plain again when they are given back."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from accel_nb.accelerator import Accelerator
from accel_nb.runtime.world import World
from tests.ranks.launch import run_ranks
from tests.support.nightly import nightly


class Block(nn.Module):
    """A layer with a nonlinearity."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Tower(nn.Module):
    """Blocks in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def train(world: World, backend: str, regional: bool) -> tuple[list[float], list[str], bool]:
    torch.manual_seed(2)
    model = Tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"compile": {"backend": backend, "regional": regional}}
    accelerator = Accelerator(world=world, cpu=True, mixed_precision="bf16" if not regional else "no", config=options)
    accelerator.prepare(model, optimizer)
    for number in range(3):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(number))
        accelerator.backward(model(x[world.rank :: world.size]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    notes = accelerator.describe()["notes"]
    weights = torch.cat([value.detach().flatten() for value in model.parameters()]).tolist()
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    accelerator.close()
    is_plain = "forward" not in vars(model) and all(block._compiled_call_impl is None for block in model.blocks)
    return weights, notes, is_plain and all(type(twin) is Tower for twin in twins)


@pytest.mark.parametrize(("size", "regional"), [(1, True), nightly(1, False), (2, False), nightly(2, True)])
def test_compiled_models_train_as_plain_ones(size: int, regional: bool) -> None:
    def run(backend: str) -> tuple[list[float], list[str], bool]:
        return run_ranks(train, size, backend, regional)[-1]  # also one alone: the compiler leaves threads behind

    plain, _, _ = run("no")
    weights, notes, is_plain = run("aot_eager")
    assert weights == pytest.approx(plain, abs=1e-6 if regional else 1e-2)
    assert any("compiled by aot_eager, " + ("3 blocks" if regional else "as a whole") in note for note in notes)
    assert is_plain
