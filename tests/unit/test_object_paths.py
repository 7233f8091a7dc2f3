"""What functions, methods, partials and objects hold travels like what has a name: in place, in both directions."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import weakref
from collections import Counter, OrderedDict, defaultdict, deque

import numpy as np
import pytest
import torch
from torch import nn

from accel_nb.pool.sync.paths.items_before import ItemsBefore
from accel_nb.pool.sync.paths.object_paths import readable_path, referenced_objects, resolve_path
from tests.support.namespace_sides import Sides

CELLS = """
import functools, torch

def make_step(model, optimizer):
    losses = []
    count = 0
    def step(x):
        nonlocal count
        count += 1
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        return count
    def read():
        return model, optimizer, losses, count
    return step, read

def train(x, model=None, seen=[]):
    seen.append(len(x))
    model.weight.data.add_(1)

class Trainer:
    def __init__(self, model):
        self.model, self.history, self.best = model, [], None
        self.ema = torch.zeros(2)
    def fit(self, x):
        self.model.weight.data.add_(1)
        self.history.append(1)
        self.ema += 1
        self.best = len(self.history)

class Estimator(Trainer):
    def __init__(self, model):
        super().__init__(model)
        self.cache = {}
    def __getstate__(self):
        return {**vars(self), "cache": None, "version": 1}

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.losses, self.calls, self.table = [], 0, {}
    def forward(self, x):
        self.losses.append(1.0)
        self.layer.table = self.table
        self.calls += 1
        return self.layer(x)
"""


@pytest.fixture
def sides():
    sides = Sides()
    names = {"__name__": "__main__"}
    exec(compile(CELLS, "<cell>", "exec"), names)
    main = sys.modules["__main__"].__dict__
    classes = ("Trainer", "Estimator", "Net")
    for name in classes:  # pickled by value, as a class of a cell is
        main[name] = names[name]
    sides.kernel = names
    yield sides
    for name in classes:
        del main[name]
    sides.close()


def call(sides: Sides, name: str, *arguments, method: str | None = None):
    before = sides.snapshot(name)
    function = sides.worker[name] if method is None else getattr(sides.worker[name], method)
    result = function(*arguments)
    assert sides.bring_back(before) == {}
    return result


def test_what_a_closure_holds_is_trained_in_place(sides):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    sides.kernel["step"], sides.kernel["read"] = sides.kernel["make_step"](model, optimizer)
    step, weight = sides.kernel["step"], model.weight.detach().clone()
    losses = sides.kernel["read"]()[2]
    sides.ship("step", "read")
    for expected in (1, 2):
        assert call(sides, "step", torch.ones(3, 2)) == expected
    assert sides.kernel["step"] is step
    held = sides.kernel["read"]()
    assert held[0] is model
    assert held[1] is optimizer
    assert held[2] is losses
    assert len(losses) == held[3] == 2
    assert not torch.equal(weight, model.weight)
    assert torch.equal(model.weight, sides.worker["read"]()[0].weight)
    assert len(optimizer.state) == 2
    assert sides.ship("step", "read") == []


def test_a_change_here_reaches_what_a_closure_holds_there(sides):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    sides.kernel["step"], sides.kernel["read"] = sides.kernel["make_step"](model, optimizer)
    sides.ship("step", "read")
    there = sides.worker["read"]()[0]
    sides.kernel["step"](torch.ones(3, 2))
    sides.kernel["read"]()[2].append("mark")
    optimizer.param_groups[0]["lr"] = 0.5
    assert sides.ship("step")
    model_there, optimizer_there, losses, count = sides.worker["read"]()
    assert model_there is there
    assert torch.equal(there.weight, model.weight)
    assert optimizer_there.param_groups[0]["lr"] == 0.5
    assert losses[1:] == ["mark"]
    assert count == 1
    sides.worker["step"](torch.ones(1, 2))
    assert sides.worker["read"]()[3] == 2, "both functions still share one count"


@pytest.mark.parametrize("first", ["model", "step"])
def test_a_closure_and_a_name_keep_one_model(sides, first):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sides.kernel["step"], sides.kernel["read"] = sides.kernel["make_step"](model, optimizer)
    sides.kernel.update(model=model, optimizer=optimizer)
    sides.ship(first)
    sides.ship("model", "optimizer", "step", "read")
    assert sides.worker["read"]()[0] is sides.worker["model"]
    assert sides.worker["optimizer"].param_groups[0]["params"][0] is sides.worker["model"].weight
    call(sides, "step", torch.ones(3, 2))
    assert sides.kernel["model"] is model
    assert torch.equal(model.weight, sides.worker["model"].weight)


@pytest.mark.parametrize("kind", ["default", "partial", "method", "keyword"])
def test_other_callables_are_looked_into(sides, kind):
    model = nn.Linear(2, 1)
    train, x = sides.kernel["train"], torch.ones(3, 2)
    trainer = sides.kernel["Trainer"](model)
    made = {
        "default": train,
        "partial": functools.partial(train, x, model),
        "keyword": functools.partial(train, x, model=model),
        "method": trainer.fit,
    }[kind]
    arguments = {"default": (x,), "partial": (), "keyword": (), "method": (x,)}[kind]
    if kind == "default":
        train.__defaults__ = (model, [])
    sides.kernel["run"] = made
    weight = model.weight.detach().clone()
    sides.ship("run", "Trainer")
    call(sides, "run", *arguments)
    assert torch.equal(model.weight, weight + 1)
    with torch.no_grad():
        model.weight.zero_()
    sides.ship("run")
    call(sides, "run", *arguments)
    assert model.weight.unique().item() == 1
    if kind == "method":
        assert len(trainer.history) == 2


def test_a_trainer_keeps_everything_it_holds(sides):
    model = nn.Linear(2, 1)
    trainer = sides.kernel["trainer"] = sides.kernel["Trainer"](model)
    history, ema = trainer.history, trainer.ema
    sides.ship("trainer", "Trainer")
    call(sides, "trainer", None, method="fit")
    assert sides.kernel["trainer"] is trainer
    assert trainer.model is model
    assert trainer.history is history
    assert trainer.ema is ema
    assert history == [1]
    assert trainer.best == 1
    assert ema.tolist() == [1, 1]
    assert sides.ship("trainer") == []


def test_the_parts_of_an_object_with_a_state_of_its_own_stay_the_objects_that_they_were(sides):
    estimator = sides.kernel["Estimator"](nn.Linear(2, 1))
    history, ema, cache = estimator.history, estimator.ema, estimator.cache
    sides.kernel["estimator"] = estimator
    sides.ship("estimator", "Estimator")
    before = sides.snapshot("estimator")
    there = sides.worker["estimator"]
    there.history.append(1)
    there.ema += 1
    sides.bring_back(before)
    assert estimator.history is history == [1]
    assert estimator.ema is ema
    assert ema.tolist() == [1, 1]
    assert estimator.cache is cache, "the state lacks it"


def test_swapped_attributes_stay_the_objects_that_they_were(sides):
    trainer = sides.kernel["trainer"] = sides.kernel["Trainer"](nn.Linear(2, 1))
    trainer.one, trainer.two = one, two = [1], [2]
    sides.ship("trainer", "Trainer")
    before = sides.snapshot("trainer")
    there = sides.worker["trainer"]
    there.one, there.two = there.two, there.one
    sides.bring_back(before)
    assert trainer.one is two
    assert trainer.two is one
    assert (one, two) == ([1], [2])


def test_an_attribute_that_cannot_be_copied_does_not_hold_the_others_back(sides):
    trainer = sides.kernel["trainer"] = sides.kernel["Trainer"](nn.Linear(2, 1))
    sides.ship("trainer", "Trainer")
    for count in (1, 2):
        before = sides.snapshot("trainer")
        sides.worker["trainer"].stream = threading.local()
        sides.worker["trainer"].history.append(count)
        sides.worker["trainer"].best = count
        assert sides.bring_back(before) == {"trainer.stream": "_local cannot be copied"}
        assert len(trainer.history) == trainer.best == count
    assert not hasattr(trainer, "stream")


def test_a_module_that_is_replaced_inside_of_a_trainer_comes_back(sides):
    trainer = sides.kernel["trainer"] = sides.kernel["Trainer"](nn.Linear(2, 1))
    sides.ship("trainer", "Trainer")
    before = sides.snapshot("trainer")
    sides.worker["trainer"].model = nn.Linear(5, 5)
    sides.bring_back(before)
    assert sides.kernel["trainer"] is trainer
    assert trainer.model.in_features == 5
    assert sides.ship("trainer") == []
    call(sides, "trainer", None, method="fit")
    assert torch.equal(trainer.model.weight, sides.worker["trainer"].model.weight)


def test_attributes_of_modules_follow_in_both_directions(sides):
    model = sides.kernel["model"] = sides.kernel["Net"]()
    losses, table = model.losses, model.table
    sides.ship("model", "Net")
    before = sides.snapshot("model")
    sides.worker["model"](torch.ones(1, 2))
    sides.worker["model"].table["a"] = 1
    assert sides.bring_back(before) == {}
    assert sides.kernel["model"] is model
    assert model.losses is losses
    assert model.table is table
    assert (losses, table, model.calls, model.layer.table) == ([1.0], {"a": 1}, 1, {"a": 1})
    assert sides.ship("model") == []
    model.losses.append(2.0)
    model.layer.extra = "x"
    there = sides.worker["model"]
    assert sides.ship("model") == ["model@own:losses", "model"]
    assert sides.worker["model"] is there
    assert (there.losses, there.layer.extra) == ([1.0, 2.0], "x")


def test_an_attribute_that_shared_memory_with_a_weight_does_not_overwrite_it(sides):
    model = sides.kernel["model"] = torch.nn.utils.spectral_norm(torch.nn.Linear(3, 4))
    assert model.weight.data_ptr() == model.weight_orig.data_ptr(), "spectral_norm shares memory until a forward"
    sides.ship("model")
    before = sides.snapshot("model")
    there = sides.worker["model"]
    there(torch.ones(2, 3)).sum().backward()
    torch.optim.SGD(there.parameters(), lr=0.1).step()
    assert sides.bring_back(before) == {}
    assert torch.equal(model.weight_orig, there.weight_orig)
    assert torch.equal(model.weight, there.weight)
    assert not torch.equal(model.weight_orig, model.weight)


def test_an_attribute_of_a_module_that_cannot_be_copied_stays_there(sides):
    model = sides.kernel["model"] = sides.kernel["Net"]()
    sides.ship("model", "Net")
    before = sides.snapshot("model")
    sides.worker["model"].stream = threading.local()
    sides.worker["model"].calls = 7
    sides.bring_back(before)
    assert sides.kernel["model"] is model
    assert model.calls == 7
    assert not hasattr(model, "stream")


@pytest.mark.parametrize(
    ("value", "change", "expected"),
    [
        (deque([1], maxlen=3), lambda v: v.append(2), deque([1, 2])),
        (defaultdict(list, a=[1]), lambda v: v["b"].append(2), {"a": [1], "b": [2]}),
        (OrderedDict(a=1, b=2), lambda v: v.move_to_end("a"), OrderedDict(b=2, a=1)),
        (Counter("aab"), lambda v: v.update("b"), Counter(a=2, b=2)),
        (bytearray(b"ab"), lambda v: v.extend(b"c"), bytearray(b"abc")),
        ({1, 2}, lambda v: v.discard(1), {2}),
        ([1], lambda v: v.append(v[0]), [1, 1]),
        (np.arange(3), lambda v: v.__setitem__(0, 9), np.array([9, 1, 2])),
    ],
)
def test_containers_are_filled_in_place(sides, value, change, expected):
    sides.kernel["value"] = value
    sides.ship("value")
    there = sides.worker["value"]
    before = sides.snapshot("value")
    change(there)
    sides.bring_back(before)
    assert sides.kernel["value"] is value
    assert np.array_equal(value, expected) if isinstance(value, np.ndarray) else value == expected
    assert type(value) is type(there)
    assert sides.ship("value") == []
    change(value)
    if value != expected if not isinstance(value, np.ndarray) else False:
        assert {path.partition("@")[0] for path in sides.ship("value")} == {"value"}
        assert sides.worker["value"] is there
        assert there == value


def test_a_change_is_seen_through_what_refers_to_it(sides):
    inner: list[int] = []
    sides.kernel.update(inner=inner, outer=([inner], "x"))
    sides.ship("inner", "outer")
    inner.append(1)
    sides.ship("outer")
    assert sides.worker["outer"][0][0] == [1]
    before = sides.snapshot("outer")
    sides.worker["outer"][0][0].append(2)
    sides.bring_back(before)
    assert sides.kernel["inner"] is inner
    assert inner == [1, 2]


def test_the_old_model_is_released_when_its_name_is_bound_anew(sides):
    sides.kernel["model"] = nn.Linear(2, 2)
    sides.ship("model")
    before = sides.snapshot("model", rebound=("model",))
    old = weakref.ref(sides.worker["model"])
    sides.worker["model"] = nn.Linear(3, 3)
    gc.collect()
    assert old() is None
    assert sides.bring_back(before) == {}
    assert sides.kernel["model"].in_features == 3


def test_an_old_model_that_is_trained_after_its_name_was_bound_anew_comes_back(sides):
    old = sides.kernel["model"] = nn.Linear(2, 2)
    sides.kernel["keep"] = [old]
    sides.ship("model", "keep")
    before = sides.snapshot("model", "keep", rebound=("model",))
    sides.worker["keep"][0].weight.data.fill_(3)
    sides.worker["model"] = nn.Linear(3, 3)
    sides.bring_back(before)
    assert sides.kernel["keep"][0] is old
    assert old.weight.unique().item() == 3
    assert sides.kernel["model"].in_features == 3


def test_paths_lead_to_what_was_found():
    trainer = {"nets": [nn.Linear(1, 1), (nn.ReLU(), functools.partial(print, nn.Tanh()))], "numbers": [1, 2]}
    found = referenced_objects("state", trainer)
    assert {type(part).__name__ for part in found.values()} == {"list", "Linear", "ReLU", "partial", "Tanh"}
    assert all(resolve_path({"state": trainer}, path) is part for path, part in found.items())
    with pytest.raises(LookupError):
        resolve_path({"state": {}}, next(iter(found)))


def test_paths_are_shown_as_code_would_write_them():
    assert readable_path("model") == "model"
    assert readable_path("trainer@attribute:optimizer") == "trainer.optimizer"
    assert readable_path("models@item:0@attribute:head") == "models[0].head"
    assert readable_path("step@cell:loss") == "step.loss"


class Configured:
    """An object of a class whose ``__new__`` needs an argument."""

    def __new__(cls, config):
        return super().__new__(cls)

    def __init__(self, config):
        self.config = config
        self.batches = (number for number in range(3))
        next(self.batches)


def test_an_object_whose_class_needs_arguments_comes_back_without_what_cannot_be_copied(sides, monkeypatch):
    monkeypatch.setattr(Configured, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "Configured", Configured, raising=False)
    before = sides.snapshot()
    sides.worker.update(made=Configured([1]), number=3)
    assert sides.bring_back(before) == {"made.batches": "generator cannot be copied"}
    assert sides.kernel["number"] == 3
    assert sides.kernel["made"].config == [1]


class Logged(nn.Module):
    """A module with a list."""

    def __init__(self):
        super().__init__()
        self.layer, self.log = nn.Linear(1, 1), []


def test_a_module_whose_name_has_the_sign_of_paths_is_followed(sides, monkeypatch):
    monkeypatch.setattr(Logged, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "Logged", Logged, raising=False)
    model = nn.ModuleDict({"50%40@home": Logged()})
    sides.kernel["model"] = model
    sides.ship("model")
    before = sides.snapshot("model")
    there = sides.worker["model"]["50%40@home"]
    there.log.append(1)
    with torch.no_grad():
        there.layer.weight.fill_(3)
    assert sides.bring_back(before) == {}
    assert model["50%40@home"].log == [1]
    assert model["50%40@home"].layer.weight.item() == 3
    model["50%40@home"].log.append(2)
    sides.ship("model")
    assert there.log == [1, 2]


def test_tuples_in_tuples_may_be_deep():
    box: list = []
    nested: tuple = (box,)
    for _ in range(20_000):
        nested = (nested,)
    assert referenced_objects("chain", [nested, box]) == {"chain@item:1": box}
    before = ItemsBefore(["chain"], [], {"chain": [nested]}, frozenset, {})
    assert before.describe_other_uses([]) == []


def test_tuples_that_share_tuples_are_looked_at_once(sides):
    shared: tuple = ([1],)
    for _ in range(60):
        shared = (shared, shared)
    sides.kernel["values"] = [shared]
    sides.ship("values")
    before = sides.snapshot("values")
    sides.worker["values"].append(2)
    assert sides.bring_back(before) == {}
    assert sides.kernel["values"][1] == 2
