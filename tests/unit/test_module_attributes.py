"""Attributes that code sets on modules: ``forward``, and private ones of a subclass of torch's layers."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch import nn

from accel_nb.pool.sync.objects.user_attributes import user_attributes
from tests.support.namespace_sides import Sides

ONE = torch.ones(1, 1)


class Merging(nn.Linear):
    """A layer that records in private attributes what was done with it, as layers with adapters do."""

    def __init__(self):
        super().__init__(1, 1)
        self._is_merged, self._log = False, []


@pytest.fixture(name="both")
def _both(monkeypatch):
    monkeypatch.setattr(Merging, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "Merging", Merging, raising=False)
    both = Sides()
    yield both
    both.close()


def _multiply(module: nn.Module, factor: int) -> None:
    module.forward = types.MethodType(lambda self, x: x * factor, module)


def test_a_forward_that_the_notebook_sets_is_sent(both):
    model = nn.Sequential(nn.Linear(1, 1))
    both.kernel["model"] = model
    both.ship("model")
    for factor in (2, 3):
        _multiply(model[0], factor)
        assert both.ship("model") == ["model"]
        assert both.worker["model"](ONE).item() == factor
        assert both.ship("model") == []
    del model[0].forward
    both.ship("model")
    assert torch.equal(both.worker["model"](ONE), model(ONE))


def test_a_forward_that_a_cell_sets_comes_back(both):
    model = nn.Sequential(nn.Linear(1, 1))
    both.kernel["model"] = model
    both.ship("model")
    before = both.snapshot("model")
    _multiply(both.worker["model"][0], 2)
    assert both.bring_back(before) == {}
    assert both.kernel["model"] is model
    assert model[0].forward.__self__ is model[0]
    assert model(ONE).item() == 2
    assert both.ship("model") == []
    before = both.snapshot("model")
    del both.worker["model"][0].forward
    assert both.bring_back(before) == {}
    assert torch.equal(both.worker["model"](ONE), model(ONE))


def test_private_attributes_of_a_subclass_of_a_layer_are_followed(both):
    model = Merging()
    both.kernel["model"] = model
    both.ship("model")
    before, there = both.snapshot("model"), both.worker["model"]
    there._is_merged = True
    there._log.append("merged")
    assert both.bring_back(before) == {}
    assert model._is_merged
    assert model._log == ["merged"]
    model._is_merged = False
    model._log.append("split")
    both.ship("model")
    assert not there._is_merged
    assert there._log == ["merged", "split"]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.MultiheadAttention, nn.Conv2d])
def test_private_attributes_of_the_layers_of_torch_stay_apart(both, kind):
    own = type("Own", (kind,), {"__module__": "__main__"})
    model = own(2, 2, 1) if kind is nn.Conv2d else own(2, 2)
    both.kernel["model"] = model
    both.ship("model")
    assert both.ship("model") == []
    before, weights = both.snapshot("model"), list(model.parameters())
    with torch.no_grad():
        next(both.worker["model"].parameters()).fill_(3)
    assert both.bring_back(before) == {}
    assert all(one is two for one, two in zip(weights, model.parameters(), strict=True))
    assert all(one is two for one, two in zip(getattr(model, "_flat_weights", weights), weights, strict=True))


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_the_forward_of_a_scripted_layer_is_not_one_of_the_user():
    model = nn.Sequential(torch.jit.script(nn.Linear(1, 1)))
    model(ONE)  # now the attribute is there
    assert user_attributes(model) == {}
