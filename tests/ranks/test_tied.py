"""Parameters that go by several names: one object, one gradient, one step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from accel_nb.accelerator import Accelerator
from accel_nb.runtime.tensors.tied import find_tied, move_tied, tie_again
from accel_nb.runtime.world import World
from tests.ranks.launch import run_ranks


class Language(nn.Module):
    """Embedding and head share their weights, as in language models."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 4)
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.embed(x)))


@pytest.fixture
def untying() -> Iterator[None]:
    """Make ``Module.to`` replace parameters, as it does on some devices."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    yield
    torch.__future__.set_overwrite_module_params_on_conversion(False)


def test_groups_of_names_are_found() -> None:
    model = Language()
    assert find_tied(model) == [["embed.weight", "head.weight"]]
    model.third = nn.Linear(4, 7, bias=False)
    model.third.weight = model.embed.weight
    assert find_tied(model) == [["embed.weight", "head.weight", "third.weight"]]
    assert find_tied(model.inner) == []


@pytest.mark.usefixtures("untying")
def test_a_move_that_unties_is_mended_and_optimizers_follow() -> None:
    model = Language()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.tensor([1, 2])).square().mean().backward()
    gradient = model.embed.weight.grad.clone()
    optimizer.step()
    momentum = optimizer.state[model.embed.weight]["momentum_buffer"]
    before = model.embed.weight

    move_tied(model, lambda moved: nn.Module.to(moved, torch.float64), [optimizer])

    assert model.embed.weight is not before  # else this test shows nothing
    assert model.head.weight is model.embed.weight
    assert find_tied(model) == [["embed.weight", "head.weight"]]
    torch.testing.assert_close(model.embed.weight.grad, gradient.double())
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    assert optimizer.state[model.embed.weight]["momentum_buffer"] is momentum
    assert before not in optimizer.state


@pytest.mark.usefixtures("untying")
def test_a_plain_move_unties_and_names_tie_again() -> None:
    model = Language()
    groups = find_tied(model)
    model.double()
    assert model.head.weight is not model.embed.weight
    tie_again(model, groups)
    assert model.head.weight is model.embed.weight


class Elsewhere(Accelerator):
    """Prepares on a device that its models are not on."""

    def __init__(self) -> None:
        super().__init__(cpu=True)
        self.components.preparer._device = torch.device("meta")


@pytest.mark.usefixtures("untying")
def test_preparing_moves_a_model_tied_and_its_optimizer_along() -> None:
    model = Language()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator = Elsewhere()
    accelerator.prepare(model, optimizer)
    assert model.head.weight is model.embed.weight
    assert model.embed.weight.device.type == "meta"
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in model.parameters()}


def batch(rank: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * number + rank)
    return torch.randint(7, (4,), generator=generator), torch.randint(7, (4,), generator=generator)


def trains(world: World) -> tuple[list[float], bool]:
    model = Language()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    accelerator = Accelerator(world=world, cpu=True)
    accelerator.prepare(model, optimizer)
    for number in range(4):
        x, y = batch(world.rank, number)
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    is_tied = model.head.weight is model.embed.weight
    accelerator.close()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(), is_tied


@pytest.mark.parametrize("size", [2, 3])
def test_tied_parameters_train_as_on_one_process(size: int) -> None:
    model = Language()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for number in range(4):
        optimizer.zero_grad()
        for rank in range(size):
            x, y = batch(rank, number)
            (nn.functional.cross_entropy(model(x), y) / size).backward()
        optimizer.step()
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    for weights, is_tied in run_ranks(trains, size):
        assert is_tied
        torch.testing.assert_close(torch.tensor(weights), expected)
