"""The order of an optimizer's parameters on ranks whose code took it from a set."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel_nb.accelerator.prepare.parameter_order import align_parameters
from accel_nb.runtime.distributed.communicator import LocalComm


class _Rank1(LocalComm):
    """A rank that receives the orders of the main rank."""

    def __init__(self, received: list[list[int]]) -> None:
        super().__init__()
        self._received = received

    def broadcast_json(self, value: object, source: int = 0) -> list[list[int]]:
        return self._received


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def test_each_group_has_the_order_of_the_main_rank(model: nn.Module) -> None:
    first, second, third, fourth = model.parameters()
    optimizer = torch.optim.SGD([{"params": [first, second, third]}, {"params": [fourth]}], lr=0.1)
    align_parameters([optimizer], [model], _Rank1([[2, 0, 1], [3]]))
    (ordered, rest) = (group["params"] for group in optimizer.param_groups)
    assert [id(item) for item in ordered] == [id(third), id(first), id(second)]
    assert rest == [fourth]


@pytest.mark.parametrize("received", [[[3, 1]], [[-1, 0]], []])
def test_other_parameters_keep_their_order(model: nn.Module, received: list[list[int]]) -> None:
    first, second, *_ = model.parameters()
    optimizer = torch.optim.SGD([first, second], lr=0.1)
    align_parameters([optimizer], [model], _Rank1(received))
    assert [id(item) for item in optimizer.param_groups[0]["params"]] == [id(first), id(second)]


def test_parameters_outside_of_models_keep_their_order(model: nn.Module) -> None:
    own = [nn.Parameter(torch.zeros(1)), *model.parameters()]
    optimizer = torch.optim.SGD(own, lr=0.1)
    align_parameters([optimizer], [model], _Rank1([[0, -1, 1, 2, 3]]))
    assert [id(item) for item in optimizer.param_groups[0]["params"]] == [id(item) for item in own]
