"""Divided calls of models that read values on some ranks only, and of models with unusual tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from accel_nb.accelerator import Accelerator
from accel_nb.accelerator.plain_cells.autoprepare import PlainCells
from accel_nb.runtime.world import World
from tests.ranks.launch import run_ranks
from tests.ranks.recorded_run import Run, Values, loader, mlp, squared, train


def run_later_branch(world: World) -> tuple[Values, Values]:
    """Train a model that reads a second value only where a first one, without effect, is large on this rank."""
    accelerator = Accelerator(world=world, cpu=True, config={"divide": "model"})
    cells, run = PlainCells(accelerator), Run()
    torch.manual_seed(7)
    with cells.run_cell():
        later_branch(run)
    accelerator.close()
    return run.printed, run.weights


def later_branch(run: Run) -> None:
    class Checking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor) -> Tensor:
            num_large = int((x[:, 0] > 0).sum())
            if num_large > 0 and x.isnan().any():
                x = x.nan_to_num()
            return self.inner(x)

    x, y, label = next(iter(loader(num_samples=24, batch_size=24)))
    x[:, 0] = x[:, 0].abs()
    x[12:16, 0] *= -1  # the rows of the second rank in the second batch
    train(run, Checking(), squared, DataLoader(TensorDataset(x, y, label), batch_size=8))


def test_ranks_whose_rows_are_read_more_often_take_the_same_way() -> None:
    (printed, weights), (_, other_weights) = run_ranks(run_later_branch, 2, timeout_s=60)
    expected = Run()
    torch.manual_seed(7)
    later_branch(expected)
    assert weights == other_weights
    assert printed == pytest.approx(expected.printed, rel=1e-9)
    assert weights == pytest.approx(expected.weights, rel=1e-9)


def run_odd_arguments(world: World) -> Values:
    accelerator = Accelerator(world=world, cpu=True, config={"divide": "model"})
    cells, run = PlainCells(accelerator), Run()
    torch.manual_seed(7)
    with cells.run_cell():
        odd_arguments(run)
    accelerator.close()
    return run.printed


def odd_arguments(run: Run) -> None:
    """Call models with a conjugated tensor, which is a view, and with a nested one, which has no shape."""

    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor) -> Tensor:
            if x.is_nested:
                x = torch.nested.to_padded_tensor(x, 0.0)
            return self.inner(x.real + x.imag if x.is_complex() else x)

    def loss_of(model: nn.Module, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        rows = torch.nested.nested_tensor([row[: 6 - row_number % 2] for row_number, row in enumerate(x)])
        conjugated = squared(model, torch.fft.fft(x).conj(), y, label)
        return conjugated + squared(model, rows, y, label)

    train(run, Either(), loss_of, loader(num_samples=16))


def test_conjugated_and_nested_arguments_give_the_values_of_one_device() -> None:
    first, second = run_ranks(run_odd_arguments, 2, timeout_s=60)
    expected = Run()
    torch.manual_seed(7)
    odd_arguments(expected)
    assert first == second == pytest.approx(expected.printed, rel=1e-9)
