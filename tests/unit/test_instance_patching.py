"""Classes for one instance: copies, derived classes and static methods."""

from __future__ import annotations

import copy
import pickle
import types

import pytest
import torch
from torch import nn

from accel_nb.runtime.tensors.instance_patching import (
    innermost_class,
    patch_instance,
    replace_forward,
    restore_forward,
    unbound_forward,
)


class Scaled(nn.Linear):
    """A layer."""


def doubled(self, x):
    return 2 * nn.Linear.forward(self, x)


class Frozen(type(nn.Module)):
    """A metaclass whose classes cannot be changed."""

    def __setattr__(cls, name, value):
        raise AttributeError("frozen")

    __delattr__ = __setattr__


class Static(nn.Module):
    @staticmethod
    def forward(x):
        return x + 1


def test_an_object_whose_class_a_library_has_derived_is_copied_and_pickled():
    model = patch_instance(nn.Linear(2, 1), {})
    model.__class__ = type("Derived", (type(model),), {})
    assert type(copy.deepcopy(model)) is nn.Linear
    assert type(pickle.loads(pickle.dumps(model))) is nn.Linear
    assert type(model).__name__ == "Derived"


def test_a_static_forward_is_called_without_the_module():
    one = torch.ones(1)
    assert unbound_forward(Static())(Static(), one) == 2
    forward = unbound_forward(model := Static())
    replace_forward(model, lambda x: forward(model, x) * 2)
    assert model(one) == 4
    assert innermost_class(model) is Static


@pytest.mark.parametrize("make", [copy.deepcopy, copy.copy, lambda model: model.__reduce_ex__(2)[2]])
def test_a_copy_has_the_forward_that_was_set_on_the_model(make):
    model = Scaled(2, 1)
    model.forward = types.MethodType(doubled, model)
    for factor in (3, 5):
        replace_forward(model, lambda x, factor=factor: factor * x)

    copied = make(model)

    own = copied["forward"] if isinstance(copied, dict) else vars(copied)["forward"]
    assert own.__func__ is doubled
    assert own.__self__ is (copied if make is copy.deepcopy else model)
    assert model(torch.ones(2)).tolist() == [5, 5]
    assert "forward" not in vars(model)


def test_a_forward_that_is_set_on_a_prepared_model_stays():
    model = Scaled(2, 1)
    model.forward = types.MethodType(doubled, model)
    replace_forward(model, lambda x: 3 * x)
    model.forward = lambda x: 7 * x

    assert copy.deepcopy(model)(torch.ones(1)) == 7
    assert model(torch.ones(1)) == 7


def test_a_class_that_cannot_be_changed_is_that_of_a_prepared_model():
    made = []

    class Base(nn.Module, metaclass=Frozen):
        def __init_subclass__(cls):
            made.append(cls)

    type.__setattr__(Base, "__module__", "__main__")
    type.__setattr__(Frozen, "__module__", "__main__")
    try:
        model = replace_forward(Base(), lambda x: 3 * x)
        assert model(torch.ones(1)) == 3
        assert restore_forward(model) is model
        assert (type(model), made) == (Base, [])
    finally:
        type.__setattr__(Frozen, "__module__", __name__)
