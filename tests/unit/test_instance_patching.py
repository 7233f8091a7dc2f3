"""Classes for one instance: copies, derived classes and static methods."""

from __future__ import annotations

import copy
import pickle

import torch
from torch import nn

from accel_nb.runtime.tensors.instance_patching import (
    innermost_class,
    patch_instance,
    replace_forward,
    unbound_forward,
)


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
