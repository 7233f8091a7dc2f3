"""Weights, buffers and flags of models, which are compared by sums of their bits and copied in place."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.namespace_sides import Sides


@pytest.fixture(name="both")
def _both():
    both = Sides()
    yield both
    both.close()


def _with_mask() -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.ones(9, dtype=torch.uint8)[1:6])
    return model


def _with_flat_weights() -> nn.Module:
    model, flat = nn.Linear(2, 2, dtype=torch.bfloat16), torch.zeros(7, dtype=torch.bfloat16)
    model.weight, model.bias = nn.Parameter(flat[1:5].view(2, 2)), nn.Parameter(flat[5:])
    return model


@pytest.mark.parametrize("make", [_with_mask, _with_flat_weights])
def test_weights_come_back_beside_tensors_that_begin_within_a_word(both, make):
    model = make()
    both.kernel["model"] = model
    both.ship("model")
    before = both.snapshot("model")
    with torch.no_grad():
        both.worker["model"].weight.fill_(3)
    assert both.bring_back(before) == {}
    assert model.weight.unique().item() == 3
    assert both.ship("model") == []


@pytest.mark.parametrize("size", [(3,), (2, 5), (128, 512), (70, 1000)])
def test_rows_and_columns_that_change_places_are_sent(both, size):
    model = nn.ParameterList([nn.Parameter(torch.rand(size).round())])
    both.kernel["model"] = model
    both.ship("model")
    for dim in range(len(size)):
        order = torch.arange(size[dim])
        order[:2] = order[:2].flip(0)
        model[0].data.select(dim, 0).fill_(0)
        model[0].data.select(dim, 1).fill_(1)
        both.ship("model")
        model[0].data = model[0].data.index_select(dim, order)
        assert both.ship("model") == ["model"]
        assert torch.equal(both.worker["model"][0], model[0])
        assert both.ship("model") == []


def test_complex_weights_that_are_frozen_are_frozen_on_the_other_side(both):
    model = nn.Linear(2, 2, dtype=torch.complex64)
    both.kernel["model"] = model
    both.ship("model")
    before = both.snapshot("model")
    both.worker["model"].weight.requires_grad_(False)
    both.bring_back(before)
    assert [value.requires_grad for value in model.parameters()] == [False, True]


def _quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8)


@pytest.mark.parametrize("make", [lambda: torch.empty(3, device="meta"), _quantized], ids=["meta", "quantized"])
def test_a_model_with_a_buffer_that_has_no_plain_bytes_comes_back(both, make):
    model = nn.Linear(2, 2)
    model.register_buffer("extra", make())
    both.kernel["model"] = model
    both.ship("model")
    before = both.snapshot("model")
    with torch.no_grad():
        both.worker["model"].eval().weight.fill_(3)
    assert both.bring_back(before) == {}
    assert model.weight.unique().item() == 3
    assert not model.training
