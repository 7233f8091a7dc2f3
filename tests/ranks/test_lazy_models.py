"""Models with lazy layers, which have no parameters before their first call, train as on one device."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from accel_nb.accelerator import Accelerator
from accel_nb.accelerator.plain_cells.autoprepare import PlainCells
from accel_nb.runtime.world import World
from tests.ranks.launch import run_ranks
from tests.ranks.recorded_run import loader, mlp


def train(num_loops: int) -> list[float]:
    torch.manual_seed(7)
    model = nn.Sequential(nn.LazyLinear(10), nn.LazyBatchNorm1d(), nn.Dropout(0.2), nn.LazyLinear(1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    for _ in range(num_loops):
        for x, y, _ in loader(shuffle=True):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).sqrt().backward()
            optimizer.step()
    return torch.cat([value.double().flatten() for value in model.state_dict().values()]).tolist()


def train_two(namespace: dict[str, object], begin_statement: Callable[[], object]) -> list[float]:
    """Train a lazy model beside one that is prepared, and once more in another statement."""
    torch.manual_seed(7)
    model, lazy = mlp(), nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(1)).double()
    namespace |= {"model": model, "lazy": lazy}
    for _ in range(2):
        optimizers = [torch.optim.SGD(item.parameters(), lr=0.1) for item in (model, lazy)]
        namespace["optimizers"] = optimizers
        begin_statement()
        for x, y, _ in loader(shuffle=True):
            for item, optimizer in zip((model, lazy), optimizers, strict=True):
                optimizer.zero_grad()
                F.mse_loss(item(x), y).backward()
                optimizer.step()
    return torch.cat([value.flatten() for item in (model, lazy) for value in item.state_dict().values()]).tolist()


def two_on_workers(world: World) -> list[float]:
    accelerator, namespace = Accelerator(world=world, cpu=True), {}
    cells = PlainCells(accelerator)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with cells.run_cell():
            weights = train_two(namespace, lambda: cells.prepare(namespace, namespace))
        assert namespace["lazy"] in [item for item in accelerator.prepared_objects if isinstance(item, nn.Module)]
    accelerator.close()
    return weights


def on_workers(world: World) -> tuple[list[float], list[str]]:
    accelerator = Accelerator(world=world, cpu=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with PlainCells(accelerator).run_cell():
            weights = train(3)
    accelerator.close()
    return weights, [str(item.message) for item in caught if "lazy layers" in str(item.message)]


def test_a_lazy_model_trains_as_on_one_device_and_the_cell_says_that_it_is_not_divided() -> None:
    (first, warned), (second, _) = run_ranks(on_workers, 2, timeout_s=60)
    assert first == second == pytest.approx(train(3), rel=1e-9, abs=1e-9)
    assert len(warned) == 1
    assert "Sequential has lazy layers" in warned[0]


def test_a_lazy_model_is_prepared_in_the_statement_after_its_first_call() -> None:
    first, second = run_ranks(two_on_workers, 2, timeout_s=60)
    assert first == second == pytest.approx(train_two({}, lambda: None), rel=1e-9, abs=1e-9)
