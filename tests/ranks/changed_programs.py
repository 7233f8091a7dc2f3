"""Programs whose model, or what its code reads, is changed between two calls."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any

import numpy
from torch import Tensor, nn
from torch.nn import functional as F

from tests.ranks.recorded_run import Run, loader, mlp, sgd, squared, train

_CHANGED_CALL = 6
"""The call before which a program changes its model: none of those in which a divided call is compared."""


def _clamp_gradient(value: Tensor) -> None:
    assert value.grad is not None
    value.grad.clamp_(-1e-3, 1e-3)


def clamped_by_hooks_after_accumulation(run: Run) -> None:
    model = mlp()
    run.models.append(model)
    optimizer = sgd(model)
    for epoch in range(2):
        for x, y, label in loader():
            optimizer.zero_grad()
            squared(model, x, y, label).backward()
            optimizer.step()
        for value in model.parameters() if not epoch else ():
            value.register_post_accumulate_grad_hook(_clamp_gradient)


def printed_before_the_backward_pass_of_a_layer(run: Run) -> None:
    model: Any = mlp()
    run.models.append(model)
    optimizer = sgd(model)
    for epoch in range(2):
        for x, y, label in loader():
            optimizer.zero_grad()
            squared(model, x, y, label).backward()
            optimizer.step()
        if not epoch:
            model[2].register_full_backward_pre_hook(lambda layer, gradients: run.print(gradients[0].norm()))


def _train_changed(run: Run, model: Any, change: Callable[[Any], object]) -> None:
    numbers = iter(range(1, 100))

    def loss_of(model: nn.Module, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        if next(numbers) == _CHANGED_CALL:
            change(model)
        return squared(model, x, y, label)

    train(run, model, loss_of, loader(num_samples=56))


class _Centring(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def layer_replaced(run: Run) -> None:
    _train_changed(run, nn.Sequential(nn.Identity(), mlp()), lambda model: model.__setitem__(0, _Centring()))


def forward_replaced(run: Run) -> None:
    def change(model: Any) -> None:
        model[0].forward = lambda x: F.linear(x - x.mean(0), model[0].weight, model[0].bias)

    _train_changed(run, mlp(), change)


class _Mode(enum.Enum):
    PLAIN = 1
    CENTRED = 2


class _Switch:
    def __init__(self, is_on: bool) -> None:
        self.is_on = is_on


@dataclasses.dataclass(slots=True)
class _SlotSwitch:
    is_on: bool


def _same(x: Tensor) -> Tensor:
    return x


def _centred(x: Tensor) -> Tensor:
    return x - x.mean(0)


class _Switched(nn.Module):
    """Centres its batch if ``is_centred(state)``."""

    def __init__(self, state: Any, is_centred: Callable[[Any], bool]) -> None:
        super().__init__()
        self.inner, self.state, self.is_centred = mlp(), state, is_centred

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(_centred(x) if self.is_centred(self.state) else x)


def _set_state(value: Any) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        model.state = value

    return change


def _turn_on(model: Any) -> None:
    model.state.is_on = True


def enum_replaced(run: Run) -> None:
    model = _Switched(_Mode.PLAIN, lambda state: state is _Mode.CENTRED)
    _train_changed(run, model, _set_state(_Mode.CENTRED))


def tuple_replaced(run: Run) -> None:
    _train_changed(run, _Switched((1, False), lambda state: state[1]), _set_state((1, True)))


def numpy_number_replaced(run: Run) -> None:
    model = _Switched(numpy.float64(0.0), lambda state: state > 0.5)
    _train_changed(run, model, _set_state(numpy.float64(1.0)))


def object_replaced(run: Run) -> None:
    _train_changed(run, _Switched(_Switch(False), lambda state: state.is_on), _set_state(_Switch(True)))


def object_with_slots_changed(run: Run) -> None:
    _train_changed(run, _Switched(_SlotSwitch(False), lambda state: state.is_on), _turn_on)


def function_replaced(run: Run) -> None:
    class Applying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.state = mlp(), _same

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.state(x))

    _train_changed(run, Applying(), _set_state(_centred))


def meter_with_slots(run: Run) -> None:
    @dataclasses.dataclass(slots=True)
    class Meter:
        total: float = 0.0

    class Metered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.meter = mlp(), Meter()

        def forward(self, x: Tensor) -> Tensor:
            self.meter.total += x.sum().item()
            return self.inner(x)

    def loss_of(model: Any, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        loss = squared(model, x, y, label)
        run.print(model.meter.total)
        return loss

    train(run, Metered(), loss_of)


CHANGED = [
    clamped_by_hooks_after_accumulation, printed_before_the_backward_pass_of_a_layer, layer_replaced, forward_replaced,
    enum_replaced, tuple_replaced, numpy_number_replaced, object_replaced, object_with_slots_changed, function_replaced,
    meter_with_slots,
]  # fmt: skip
