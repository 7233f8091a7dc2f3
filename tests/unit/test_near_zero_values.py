"""Values of a model that are almost zero are random inside of the block, and the same as before after it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel_nb.accelerator.model_division.near_zero_values import randomize_near_zero


def build() -> nn.Module:
    model = nn.Linear(3, 2)
    nn.init.zeros_(model.bias)
    model.register_buffer("expanded", torch.zeros(1, device="cpu").expand(4))
    model.register_buffer("eighths", torch.zeros(4, device="cpu").to(torch.float8_e4m3fn))
    return model


def test_values_come_back_also_beside_tensors_that_cannot_be_written() -> None:
    model = build()
    weight = model.weight.detach().clone()
    with randomize_near_zero(model):
        assert model.bias.abs().min() > 0
        assert torch.equal(model.weight, weight)
    assert not model.bias.any()
    assert not model.eighths.float().any()


def test_values_come_back_after_an_interrupt_while_they_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(build(), build())
    calls = iter([torch.rand(2), KeyboardInterrupt()])

    def interrupted(*_: object, **__: object) -> torch.Tensor:
        found = next(calls)
        if isinstance(found, KeyboardInterrupt):
            raise found
        return found

    monkeypatch.setattr(torch, "rand", interrupted)
    with pytest.raises(KeyboardInterrupt), randomize_near_zero(model):
        pass
    assert not any(layer.bias.any() for layer in model)
