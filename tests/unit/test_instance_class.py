"""The class of a prepared object makes plain objects when it is called, as code that copies by type does."""

from __future__ import annotations

import abc

import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_nb.accelerator import Accelerator


class Net(nn.Module):
    """Scales by what it was made with."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2, dtype=torch.float64)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).float() * self.scale


def test_calling_the_class_of_what_is_prepared_makes_a_plain_object() -> None:
    model = Net(2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(torch.arange(6.0), batch_size=2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", batch="global")
    accelerator.prepare(model, optimizer, loader, scheduler)
    assert type(model) is not Net

    target = type(model)(3.0)
    assert type(target) is Net
    assert type(model.__class__(1.0)) is Net
    with torch.no_grad():
        target.layer.weight.zero_()
        target.layer.bias.fill_(1.0)
    assert target(torch.zeros(1, 2, dtype=torch.float64)).tolist() == [[3.0, 3.0]]

    again = type(loader)(torch.arange(4.0), batch_size=4)
    assert type(again) is DataLoader
    assert [batch.tolist() for batch in again] == [[0, 1, 2, 3]]
    assert type(type(scheduler)(optimizer, 3)) is torch.optim.lr_scheduler.StepLR
    accelerator.close()


def test_a_class_derived_from_that_of_a_prepared_model_makes_its_own_objects() -> None:
    model = Net(2.0)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    accelerator.prepare(model)
    assert type(model) is not Net

    class Wider(type(model)):  # type: ignore[misc]
        """Derived as a library derives it."""

    assert type(Wider(1.0)) is Wider
    accelerator.close()


def test_an_object_of_a_class_derived_from_that_of_a_prepared_model_computes_with_its_own_parameters() -> None:
    model = Net(2.0)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    accelerator.prepare(model)

    class Stateless(metaclass=abc.ABCMeta):
        """As the base class of a library that derives from the classes of models."""

        @abc.abstractmethod
        def scaled(self) -> float: ...

    class Other(type(model), Stateless):  # type: ignore[misc]
        """Has other parameters."""

        def scaled(self) -> float:
            return self.scale

    other, x = Other(3.0), torch.zeros(1, 2, dtype=torch.float64)
    with torch.no_grad():
        for value in other.parameters():
            value.fill_(1.0)
        for value in model.parameters():
            value.fill_(5.0)
    plain = Net(3.0)
    plain.load_state_dict(other.state_dict())
    assert torch.equal(other(x), plain(x))
    accelerator.close()
