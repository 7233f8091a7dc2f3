"""Losses that are no plain mean over samples count, on N workers, as they do on one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from accel_nb.accelerator import Accelerator
from accel_nb.accelerator.plain_cells.autoprepare import PlainCells
from accel_nb.runtime.world import World
from tests.ranks.launch import run_ranks
from tests.support.nightly import nightly

BATCH, TOKENS, CLASSES = 5, 4, 5
WEIGHTS = torch.tensor([1.0, 5.0, 0.5, 2.0, 0.0], dtype=torch.float64)

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "tokens, some ignored": lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()),
    "another index ignored": lambda out, y: F.cross_entropy(out[:, 0], y[:, 0].clamp(min=0), ignore_index=2),
    "class weights": lambda out, y: F.cross_entropy(out[:, 0], y[:, 0].clamp(min=0), weight=WEIGHTS),
    "two-dimensional targets": lambda out, y: F.cross_entropy(out.transpose(1, 2), y) / 3,
    "sum over a constant": lambda out, y: F.cross_entropy(out[:, 0], y[:, 0].clamp(min=0), reduction="sum") / BATCH,
    "sum times a constant": lambda out, y: 0.1 * F.mse_loss(out[:, 0, 0], y[:, 0].double(), reduction="sum"),
    "sum over the samples here": lambda out, y: out.square().sum((1, 2)).sum() / len(out),
    "sum over the numbers here": lambda out, y: F.mse_loss(out, torch.zeros_like(out), reduction="sum") / out.numel(),
    "one target for each sample": lambda out, y: F.cross_entropy(out[:, 0], y[:, 0].clamp(min=0)),
    "sums added": lambda out, y: F.mse_loss(out, torch.zeros_like(out), reduction="sum") - 0.5 * out.tanh().sum(),
    "sums added over the samples here": lambda out, y: (out.square().sum() + 2 * out.tanh().sum()) / len(out),
    "sums added over a constant": lambda out, y: (out.square().sum() + 1 + 2 * out.tanh().sum()) / BATCH,
    "means added": lambda out, y: F.cross_entropy(out[:, 0], y[:, 0].clamp(min=0)) + 0.1 * out.square().mean(),
    "masked mean": lambda out, y: (out.square().sum(-1) * (y >= 0)).sum() / (y >= 0).sum(),
}


def parts() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[tuple[Tensor, ...]]]:
    torch.manual_seed(3)
    model = nn.Linear(2, CLASSES, dtype=torch.float64)
    x = torch.randn(16, TOKENS, 2, dtype=torch.float64)
    y = torch.randint(CLASSES, (16, TOKENS))
    y[torch.rand(16, TOKENS) < 0.4] = -100
    y[:, -1] = 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, optimizer, DataLoader(TensorDataset(x, y), batch_size=BATCH)


def by_hand(name: str, accumulate: int) -> list[float]:
    model, optimizer, loader = parts()
    for _ in range(2):
        window = 0
        for number, (x, y) in enumerate(loader, 1):
            LOSSES[name](model(x), y).backward()
            window += 1
            if window < accumulate and number < len(loader):
                continue
            for value in model.parameters():
                assert value.grad is not None
                value.grad /= window
            optimizer.step()
            optimizer.zero_grad()
            window = 0
    return torch.cat([value.detach().flatten() for value in model.parameters()]).tolist()


CASES = [(name, accumulate) for accumulate in (1, 2) for name in LOSSES]


def plain(world: World, strategy: str) -> list[list[float]]:
    found = []
    for name, accumulate in CASES:
        model, optimizer, loader = parts()
        accelerator = Accelerator(world=world, cpu=True, gradient_accumulation_steps=accumulate, strategy=strategy)
        cells = PlainCells(accelerator)
        cells.prepare({"model": model, "optimizer": optimizer, "loader": loader}, ["model", "optimizer", "loader"])
        with cells.run_cell():
            for _ in range(2):
                for x, y in loader:
                    LOSSES[name](model(x), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        accelerator.close()
        found.append(torch.cat([value.detach().flatten() for value in model.parameters()]).tolist())
    return found


@pytest.mark.parametrize(("strategy", "size"), [nightly("ddp", 2), nightly("ddp", 3), ("fsdp", 2), nightly("fsdp", 3)])
def test_weights_equal_those_of_one_plain_process(strategy: str, size: int) -> None:
    for weights in run_ranks(plain, size, strategy):
        for (name, accumulate), found in zip(CASES, weights, strict=True):
            assert found == pytest.approx(by_hand(name, accumulate), abs=1e-9), (name, accumulate)
