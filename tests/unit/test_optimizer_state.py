"""States of optimizers that are set in place."""

import pickle
from collections import defaultdict

import pytest
import torch

from accel_nb.pool.sync.optimizer_states import optimizer_state, own_values, set_optimizer_state
from tests.support.namespace_sides import Sides


class Wrapper(torch.optim.Optimizer):
    """An optimizer with the groups and the state of another, as SAM and Lookahead are."""

    def __init__(self, base):
        self.base = base
        super().__init__(base.param_groups, base.defaults)
        self.param_groups, self.state = base.param_groups, base.state


def trained():
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    base = torch.optim.Adam(model.parameters(), lr=0.1)
    wrapper = Wrapper(base)
    model(torch.ones(3, 2)).sum().backward()
    return base, wrapper


def test_a_wrapper_has_the_state_of_its_optimizer_after_both_are_set():
    base, wrapper = trained()
    group = base.param_groups[0]
    other, other_wrapper = trained()
    other.step()
    other.param_groups[0]["lr"] = 0.5
    set_optimizer_state(base, optimizer_state(other, {}, {}, with_tensors=True))
    set_optimizer_state(wrapper, optimizer_state(other_wrapper, {}, {}, with_tensors=True))
    assert wrapper.state is base.state
    assert wrapper.param_groups is base.param_groups
    assert base.param_groups[0] is group
    assert group["lr"] == 0.5
    for own, theirs in zip(base.state_dict()["state"].values(), other.state_dict()["state"].values(), strict=True):
        assert all(torch.equal(own[name], theirs[name]) for name in theirs)


class Counting(torch.optim.SGD):
    """An optimizer with data of its own."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.count = 0
        self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]
        self.first = self.param_groups[0]["params"][0]


def test_data_of_an_optimizer_is_set_and_parameters_are_not_data():
    own, other = (Counting(torch.nn.Linear(2, 1).parameters()) for _ in range(2))
    first = own.first
    other.count = 3
    assert own_values(other, {}, {}).keys() == {"count", "slow"}
    set_optimizer_state(own, optimizer_state(other, {}, {}, with_tensors=True))
    assert own.count == 3
    assert torch.equal(own.slow[0][0], other.slow[0][0])
    assert own.first is first


def test_optimizers_of_torch_have_no_own_values():
    assert own_values(torch.optim.LBFGS(torch.nn.Linear(2, 1).parameters()), {}, {}) == {}


class Wrapping(torch.optim.SGD):
    """An optimizer that steps another one, whose state is separate."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.inner = torch.optim.Adam(self.param_groups)


def test_the_state_of_a_wrapped_optimizer_is_set_too():
    models = [torch.nn.Linear(2, 1) for _ in range(2)]
    own, other = (Wrapping(model.parameters()) for model in models)
    models[1](torch.ones(3, 2)).sum().backward()
    other.inner.step()
    set_optimizer_state(own, optimizer_state(other, {}, {}, with_tensors=True))
    found, expected = own.inner.state_dict()["state"], other.inner.state_dict()["state"]
    assert found.keys() == expected.keys() == {0, 1}
    assert all(torch.equal(found[key]["exp_avg"], expected[key]["exp_avg"]) for key in expected)


class Keyed(torch.optim.SGD):
    """An optimizer with data by parameter in dicts of its own."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.momentum = {p: torch.zeros_like(p) for group in self.param_groups for p in group["params"]}
        self.counts = defaultdict(int)


def test_data_by_parameter_is_set_for_the_parameters_of_the_other_optimizer():
    models = [torch.nn.Linear(2, 1) for _ in range(2)]
    own, other = (Keyed(model.parameters()) for model in models)
    momentum = own.momentum
    for number, parameter in enumerate(models[1].parameters()):
        other.momentum[parameter] += 1 + number
        other.counts[parameter] += 3
    state = pickle.loads(pickle.dumps(optimizer_state(other, {}, {}, with_tensors=True)))
    set_optimizer_state(own, state)
    assert own.momentum is momentum
    assert list(own.momentum) == list(own.counts) == list(models[0].parameters())
    assert [value.flatten().tolist() for value in own.momentum.values()] == [[1, 1], [2]]
    assert list(own.counts.values()) == [3, 3]
    assert own.counts["new"] == 0


class Counted(torch.optim.Optimizer):
    """An optimizer that counts its steps in numbers."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["step"] = self.state[parameter].get("step", 0) + 1


class CountedTogether(Counted):
    """An optimizer that counts its steps for all parameters, as MADGRAD does."""

    def step(self, closure=None):
        self.state["k"] = self.state.get("k", torch.tensor([0])) + 1


class WithHistory(Counted):
    """An optimizer that keeps tensors in a list, as LBFGS does."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("past", [torch.zeros(2)])[0].add_(1)


def _values(optimizer):
    return [state if isinstance(state, torch.Tensor) else list(state.values()) for state in optimizer.state.values()]


@pytest.mark.parametrize("kind", [Counted, CountedTogether, WithHistory])
def test_state_of_every_form_is_followed_in_both_directions(kind):
    sides, model = Sides(), torch.nn.Linear(2, 1)
    optimizer = kind(model.parameters())
    optimizer.step()
    sides.kernel.update(model=model, optimizer=optimizer)
    sides.ship("model", "optimizer")
    before = sides.snapshot("model", "optimizer")
    sides.worker["optimizer"].step()
    assert sides.bring_back(before) == {}
    assert sides.kernel["optimizer"] is optimizer
    assert str(_values(optimizer)) == str(_values(sides.worker["optimizer"]))
    optimizer.step()
    assert sides.ship("model", "optimizer") == ["optimizer"]
    assert str(_values(optimizer)) == str(_values(sides.worker["optimizer"]))
    assert sides.ship("model", "optimizer") == []
    sides.close()
