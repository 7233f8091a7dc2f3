"""Optimizers that step this rank's parts of sharded parameters as plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from accel_nb.accelerator import Accelerator
from accel_nb.runtime.world import World
from tests.ranks.launch import run_ranks

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda values: torch.optim.AdamW(values, lr=0.05, amsgrad=True),
    "Adam, foreach": lambda values: torch.optim.Adam(values, lr=0.05, foreach=True, weight_decay=0.1),
    "Adam, fused": lambda values: torch.optim.Adam(values, lr=0.05, fused=True),
    "SGD": lambda values: torch.optim.SGD(values, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adagrad": lambda values: torch.optim.Adagrad(values, lr=0.05, initial_accumulator_value=0.1),
    "RMSprop": lambda values: torch.optim.RMSprop(values, lr=0.01, momentum=0.5, centered=True),
    "Adadelta": lambda values: torch.optim.Adadelta(values, lr=0.5),
    "Adamax": lambda values: torch.optim.Adamax(values, lr=0.05),
    "NAdam": lambda values: torch.optim.NAdam(values, lr=0.05),
    "RAdam": lambda values: torch.optim.RAdam(values, lr=0.05),
    "Rprop": lambda values: torch.optim.Rprop(values, lr=0.01),
    "ASGD": lambda values: torch.optim.ASGD(values, lr=0.05),
}


class Counted(TorchDispatchMode):
    """Counts operations on sharded tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += any(issubclass(kind, DTensor) for kind in types)
        return func(*args, **(kwargs or {}))


def network() -> nn.Module:
    """Return a network of which a rank has no part of some weights; some parameters are not used by the loss."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    model.register_parameter("unused", nn.Parameter(torch.ones(4, dtype=torch.float64)))
    return model


def train(world: World, strategy: str, name: str) -> tuple[list[list[float]], list[int], int]:
    """Train four steps; return the weights, the operations on sharded tensors by step, and the number of state items.

    After two steps the optimizer's state is replaced by a copy of its state dict.
    """
    torch.manual_seed(0)
    model = network()
    optimizer = OPTIMIZERS[name](model.parameters())
    accelerator = Accelerator(world=world, cpu=True, strategy=strategy, batch="global")
    loader = DataLoader(TensorDataset(torch.randn(28, 6).double(), torch.randn(28, 1).double()), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    counts = []
    for number, (x, y) in enumerate(loader):
        accelerator.backward(F.mse_loss(model(x), y))
        with Counted() as counted:
            optimizer.step()
        counts.append(counted.number)
        optimizer.zero_grad()
        if number == 1:
            optimizer.load_state_dict(optimizer.state_dict())
    state = [item for values in optimizer.state.values() for item in values.values() if torch.is_tensor(item)]
    if strategy == "fsdp":
        assert all(isinstance(item, DTensor) for item in state if item.dim())
        assert all(isinstance(value, DTensor) for group in optimizer.param_groups for value in group["params"])
    weights = [value.flatten().tolist() for value in accelerator.get_state_dict(model).values()]
    accelerator.close()
    return weights, counts, len(state)


def train_by_each(world: World, strategy: str) -> dict[str, tuple[list[list[float]], list[int], int]]:
    return {name: train(world, strategy, name) for name in OPTIMIZERS}


def test_parts_are_stepped_as_plain_tensors_with_the_result_of_one_process() -> None:
    [alone] = run_ranks(train_by_each, 1, "single")
    for found in run_ranks(train_by_each, 2, "fsdp"):
        for name, (expected, _, num_states) in alone.items():
            weights, counts, num_own = found[name]
            for values, whole in zip(weights, expected, strict=True):
                assert values == pytest.approx(whole, abs=1e-12), name
            assert counts == [0] * 4, name
            assert num_own == num_states, name


def look_at_steps(world: World) -> list[bool]:
    """Return whether hooks and code after a failed step see sharded parameters."""
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    seen: list[bool] = []

    def look(*_: Any) -> None:
        seen.append(all(isinstance(value, DTensor) for group in optimizer.param_groups for value in group["params"]))

    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(look)
    accelerator = Accelerator(world=world, cpu=True, strategy="fsdp")
    model, optimizer = accelerator.prepare(model, optimizer)

    def compute() -> None:
        accelerator.backward(model(torch.randn(4, 6).double()).square().mean())

    compute()
    optimizer.step()
    optimizer.param_groups[0]["betas"] = None
    compute()
    with pytest.raises(TypeError):
        optimizer.step()
    look()
    return seen


def test_hooks_and_code_after_a_failed_step_see_sharded_tensors() -> None:
    for seen in run_ranks(look_at_steps, 2):
        assert seen == [True] * 4
