"""Optimizers of whole matrices, and adapters of another dtype than the frozen weights, on sharded models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from accel_nb.accelerator import Accelerator
from accel_nb.errors import MisuseError
from accel_nb.runtime.world import World
from tests.ranks.launch import run_ranks


class Orthogonal(torch.optim.Optimizer):
    """Steps along the nearest orthogonal matrix of each gradient."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for value in group["params"]:
                left, _, right = torch.linalg.svd(value.grad, full_matrices=False)
                value.add_(left @ right, alpha=-0.05)


class Adapted(nn.Module):
    """A frozen layer in bfloat16 with a trained adapter of low rank in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 12, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x.bfloat16()).float() + self.up(self.down(x))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "orthogonal": Orthogonal,
    "Muon": lambda values: torch.optim.Muon(values, lr=0.05),
    "Adafactor": lambda values: torch.optim.Adafactor(values, lr=0.05),
    "adapted": lambda values: torch.optim.AdamW(values, lr=0.05),
}


def train(world: World, strategy: str, name: str) -> list[tuple[torch.dtype, list[float]]] | str:
    """Train a few steps; return dtype and values of each weight, or the error of the optimizer's step."""
    torch.manual_seed(0)
    first = Adapted() if name == "adapted" else nn.Linear(8, 12, bias=False)
    model = nn.Sequential(first, nn.Tanh(), nn.Linear(12, 4, bias=False))
    optimizer = OPTIMIZERS[name]([value for value in model.parameters() if value.requires_grad])
    accelerator = Accelerator(world=world, cpu=True, strategy=strategy, batch="global")
    loader = DataLoader(TensorDataset(torch.randn(16, 8), torch.randn(16, 4)), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        accelerator.backward(F.mse_loss(model(x), y))
        try:
            optimizer.step()
        except MisuseError as error:
            return str(error)
        optimizer.zero_grad()
    weights = accelerator.get_state_dict(model).values()
    return [(value.dtype, value.double().flatten().tolist()) for value in weights]


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [
        ("orthogonal", 1e-6),
        ("Muon", 6e-3),  # which multiplies in bfloat16
        ("adapted", 1e-6),
    ],
)
def test_sharded_weights_are_stepped_as_whole_ones(name: str, tolerance: float) -> None:
    [expected] = run_ranks(train, 1, "single", name)
    for found in run_ranks(train, 2, "fsdp", name):
        assert [dtype for dtype, _ in found] == [dtype for dtype, _ in expected]
        for (_, values), (_, whole) in zip(found, expected, strict=True):
            assert values == pytest.approx(whole, abs=tolerance)


def test_an_optimizer_that_pytorch_cannot_compute_on_shards_is_refused_by_name() -> None:
    assert isinstance(run_ranks(train, 1, "single", "Adafactor")[0], list)
    for message in run_ranks(train, 2, "fsdp", "Adafactor"):
        assert "Adafactor cannot step weights of which each rank holds a shard" in message
        assert "Train with --strategy ddp" in message
