"""Which of the notebook's models a value refers to, in whatever part of it the reference is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel_nb.notebook.cells.reachable_values import reachable_values
from accel_nb.pool.sync.references import referred_names


class Recursive(nn.Module):
    def __init__(self, **parts: object) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


class Reduced(nn.Module):
    def __init__(self, held: object) -> None:
        super().__init__()
        self.held = [held]

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "copies": self.held}


def _hooked(other: nn.Module) -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_forward_hook(lambda *_, held=other: None)
    return module


def _hooked_tensor(other: nn.Module) -> nn.Module:
    module = nn.Linear(2, 2)
    module.weight.register_hook(lambda grad, held=other: None)
    return module


def _tied(other: nn.Linear) -> nn.Module:
    module = nn.Linear(2, 2)
    module.weight = other.weight
    return module


def _noted(other: nn.Module) -> nn.Module:
    module = nn.Linear(2, 2)
    module.weight.note = [other]  # type: ignore[attr-defined]
    return module


def _closure(other: nn.Module) -> nn.Module:
    class Local(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return other(x)

    Local.__module__ = "__main__"
    return Local()


@pytest.mark.parametrize(
    "make",
    [
        lambda other: nn.Sequential(nn.ReLU(), other),
        lambda other: Recursive(parts=[other]),
        lambda other: Recursive(inner=Recursive(parts={"a": (1, other)})),
        Reduced,
        _hooked,
        _hooked_tensor,
        _tied,
        _noted,
        _closure,
        lambda other: {"model": other},
        lambda other: Recursive(method=other.forward),
    ],
)
def test_a_value_refers_to_a_model_of_the_notebook(make) -> None:
    other = nn.Linear(2, 2)
    names = {"other": other, "value": make(other), "apart": nn.Linear(2, 2)}
    assert referred_names(["value"], names, names) == ["other"]


def test_a_model_of_many_layers_refers_to_none() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2)) for _ in range(3)])
    names = {"model": model, "apart": nn.Linear(2, 2), "optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters())}
    assert referred_names(["model"], names, names) == []


def test_a_hook_in_a_model_of_thousands_of_layers_is_found() -> None:
    def hook(*_: object) -> None: ...

    hook.__module__ = "__main__"
    first = nn.ReLU()
    first.register_forward_hook(hook)
    model = nn.Sequential(first, *[nn.Sequential(*[nn.ReLU() for _ in range(60)]) for _ in range(60)])
    assert hook in list(reachable_values([model]))


def test_a_name_of_the_user_comes_before_those_that_ipython_gives_a_value() -> None:
    model = nn.Linear(2, 1)
    names = {"_": model, "model": model, "_3": model, "optimizer": torch.optim.SGD(model.parameters())}
    assert referred_names(["optimizer"], names, names) == ["model"]


def test_models_that_share_a_part_with_a_model_that_is_found_are_found_too() -> None:
    shared, inner, other = nn.Softplus(), nn.Sequential(), nn.Sequential()
    inner.append(shared)
    other.append(shared)
    names = {
        "inner": inner,
        "other": other,
        "model": nn.Sequential(nn.Linear(2, 2), inner),
        "unrelated": nn.Linear(2, 2),
    }
    assert set(referred_names(["other"], names, names)) == {"inner", "model"}
