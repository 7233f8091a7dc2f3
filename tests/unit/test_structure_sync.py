"""Changes of the structure of models and optimizers: the notebook's objects stay those to which others refer."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.namespace_sides import Sides


@pytest.fixture(name="both")
def _both():
    both = Sides()
    yield both
    both.close()


def test_a_group_that_a_cell_adds_is_added_to_the_optimizer_that_is_here(both):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.Adam(model[1].parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    both.kernel.update(model=model, optimizer=optimizer, scheduler=scheduler, holder=[optimizer])
    both.ship("model", "optimizer", "scheduler", "holder")
    before = both.snapshot("model", "optimizer", "scheduler", "holder")
    there = both.worker["optimizer"]
    there.add_param_group({"params": both.worker["model"][0].parameters(), "lr": 0.2})
    both.worker["model"](torch.ones(1, 2)).sum().backward()
    there.step()
    assert both.bring_back(before) == {}
    assert both.kernel["optimizer"] is scheduler.optimizer is both.kernel["holder"][0] is optimizer
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    assert all(one is two for one, two in zip(optimizer.param_groups[1]["params"], model[0].parameters(), strict=True))
    assert torch.equal(
        optimizer.state[model[0].weight]["exp_avg"], there.state[both.worker["model"][0].weight]["exp_avg"]
    )
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_groups_that_a_cell_removes_are_removed_here(both):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD([{"params": part.parameters()} for part in model], lr=0.1)
    both.kernel.update(model=model, optimizer=optimizer)
    both.ship("model", "optimizer")
    before = both.snapshot("model", "optimizer")
    del both.worker["optimizer"].param_groups[1]
    both.bring_back(before)
    assert both.kernel["optimizer"] is optimizer
    assert [len(group["params"]) for group in optimizer.param_groups] == [2]


def test_a_layer_that_a_cell_replaces_is_replaced_in_the_model_that_is_here(both):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
    old, body = model[1], model[0].weight
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    both.kernel.update(model=model, optimizer=optimizer, holder=[model])
    both.ship("model", "optimizer", "holder")
    before = both.snapshot("model", "optimizer", "holder")
    there = both.worker["model"]
    there[1] = nn.Linear(2, 1)
    there.append(nn.Tanh())
    with torch.no_grad():
        there[0].weight.fill_(5)
    both.worker["other"] = torch.optim.SGD(there.parameters(), lr=0.1)
    assert both.bring_back(before) == {}
    assert both.kernel["model"] is both.kernel["holder"][0] is model
    assert model[0].weight is body is optimizer.param_groups[0]["params"][0]
    assert body.unique().item() == 5
    assert old.out_features == 3
    assert model[1].out_features == 1
    assert torch.equal(model[1].weight, there[1].weight)
    assert len(model) == 3
    params = both.kernel["other"].param_groups[0]["params"]
    assert all(one is two for one, two in zip(params, model.parameters(), strict=True))
    assert both.ship("model", "optimizer", "holder", "other") == []
    before = both.snapshot("model")
    with torch.no_grad():
        there[1].weight.fill_(7)
    both.bring_back(before)
    assert model[1].weight.unique().item() == 7


def test_a_layer_that_a_cell_moves_inside_of_a_new_one_stays_the_same(both):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    layer = model[0]
    both.kernel.update(model=model)
    both.ship("model")
    before = both.snapshot("model")
    there = both.worker["model"]
    there[0] = nn.Sequential(there[0], nn.BatchNorm1d(2))
    both.bring_back(before)
    assert both.kernel["model"] is model
    assert model[0][0] is layer
    assert list(model.state_dict()) == list(there.state_dict())


def test_a_dtype_that_a_cell_changes_is_changed_in_the_parameters_that_are_here(both):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters())
    weight = model[0].weight
    both.kernel.update(model=model, optimizer=optimizer)
    both.ship("model", "optimizer")
    before = both.snapshot("model", "optimizer")
    there = both.worker["model"].double()
    there(torch.ones(4, 2, dtype=torch.float64)).sum().backward()
    both.worker["optimizer"].step()
    both.bring_back(before)
    assert both.kernel["model"][0].weight is weight is optimizer.param_groups[0]["params"][0]
    assert weight.dtype == optimizer.state[weight]["exp_avg"].dtype == model[1].running_mean.dtype == torch.float64
    assert torch.equal(weight, there[0].weight)


def test_lazy_layers_that_a_cell_calls_first_have_their_parameters_here(both):
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.LazyLinear(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    weight = model[0].weight
    both.kernel.update(model=model, optimizer=optimizer, holder=[model])
    both.ship("model", "optimizer", "holder")
    before = both.snapshot("model", "optimizer", "holder")
    there = both.worker["model"]
    there(torch.randn(4, 2)).sum().backward()
    both.worker["optimizer"].step()
    assert both.bring_back(before) == {}
    assert both.kernel["model"] is both.kernel["holder"][0] is model
    assert [type(part) for part in model] == [nn.Linear, nn.BatchNorm1d, nn.Linear]
    assert optimizer.param_groups[0]["params"][0] is model[0].weight is weight
    assert torch.equal(weight, there[0].weight)
    assert torch.equal(model[1].running_var, there[1].running_var)
    assert optimizer.state[weight]["momentum_buffer"].shape == (3, 2)
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()


def _named_layers() -> dict[str, Any]:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    return {"one": one, "other": other, "both": nn.Sequential(one, nn.Linear(2, 2))}


def _swap(names: dict[str, Any]) -> None:
    layers = names["both"]
    layers[0], layers[1] = layers[1], layers[0]


def _put_in(names: dict[str, Any]) -> None:
    names["both"][0] = names["other"]


def _tie(names: dict[str, Any]) -> None:
    names["other"].weight = names["one"].weight


def _same_parts(names: dict[str, Any]) -> list[int]:
    """Return for each part of the modules the number of the first part that is the same object."""
    parts = [part for name in ("one", "other", "both") for part in (*names[name].modules(), *names[name].parameters())]
    first = {id(part): number for number, part in reversed(list(enumerate(parts)))}
    return [first[id(part)] for part in parts]


@pytest.mark.parametrize("change", [_swap, _put_in, _tie])
@pytest.mark.parametrize("is_cell", [True, False])
def test_layers_that_change_places_stay_the_objects_that_they_are(both, change, is_cell):
    names = _named_layers()
    both.kernel.update(names)
    both.ship(*names)
    one, other = names["one"].weight.tolist(), names["other"].weight.tolist()
    if is_cell:
        before = both.snapshot(*names)
        change(both.worker)
        assert both.bring_back(before) == {}
        assert all(both.kernel[name] is value for name, value in names.items())
    else:
        change(both.kernel)
        both.ship(*names)
    for side in (both.kernel, both.worker):
        assert side["one"].weight.tolist() == one
        assert side["other"].weight.tolist() == (one if change is _tie else other)
    assert _same_parts(both.kernel) == _same_parts(both.worker)
    both.ship(*names)
    assert both.ship(*names) == []


@pytest.mark.parametrize("is_cell", [True, False])
def test_an_optimizer_gets_other_parameters_in_place_of_as_many(both, is_cell):
    names = {"one": nn.Linear(2, 2), "other": nn.Linear(2, 2)}
    optimizer = torch.optim.SGD(names["one"].parameters(), lr=0.1)
    both.kernel.update(names, optimizer=optimizer)
    both.ship(*names, "optimizer")
    before = both.snapshot(*names, "optimizer")
    changed = both.worker if is_cell else both.kernel
    changed["optimizer"].param_groups[0]["params"] = list(changed["other"].parameters())
    if is_cell:
        assert both.bring_back(before) == {}
        assert both.kernel["optimizer"] is optimizer
    else:
        both.ship(*names, "optimizer")
    for side in (both.kernel, both.worker):
        found = side["optimizer"].param_groups[0]["params"]
        assert all(a is b for a, b in zip(found, side["other"].parameters(), strict=True))


def test_a_weak_reference_of_the_notebook_stays_one_to_a_model_that_gets_a_layer(both):
    model = nn.Linear(2, 2)
    reference = weakref.ref(model)
    both.kernel.update(model=model, reference=reference)
    both.ship("model", "reference")
    before = both.snapshot("model", "reference")
    both.worker["model"].head = nn.Linear(2, 2)
    assert both.bring_back(before) == {}
    assert both.kernel["reference"] is reference
    assert isinstance(reference().head, nn.Linear)
