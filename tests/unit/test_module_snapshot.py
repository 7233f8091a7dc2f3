"""Snapshots of what a forward pass may change, and their restoration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from accel_nb.accelerator.model_division.module_state import ModuleSnapshot

NAN, INF = float("nan"), float("inf")


def model_with(value: torch.Tensor) -> Any:
    model: Any = nn.Module()
    model.register_buffer("values", value)
    return model


@pytest.mark.parametrize(
    ("before", "change"),
    [
        (torch.tensor([NAN, 1.0]), lambda values: values.zero_()),
        (torch.tensor([INF, 1.0]), lambda values: values.clamp_(max=torch.finfo(values.dtype).max)),
        (torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn), lambda values: values.view(torch.uint8).zero_()),
        (torch.tensor([1 + 2j]), lambda values: values.mul_(NAN)),
    ],
)
def test_changed_values_are_found_and_restored(before: torch.Tensor, change: Callable[[torch.Tensor], object]) -> None:
    model = model_with(before.clone())
    snapshot = ModuleSnapshot(model, shards_params=False)
    change(model.values)
    assert list(snapshot.restore().values) == ["values"]
    assert torch.equal(model.values.view(torch.uint8), before.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.float8_e4m3fn])
def test_nan_that_stays_is_no_change(dtype: torch.dtype) -> None:
    model = model_with(torch.full((3,), NAN).to(dtype))
    assert not ModuleSnapshot(model, shards_params=False).changes().values


def test_a_buffer_of_another_dtype_is_restored() -> None:
    model = model_with(torch.ones(2))
    snapshot = ModuleSnapshot(model, shards_params=False)
    model.values.data = model.values.data.double()
    snapshot.restore()
    assert model.values.dtype == torch.float32


def test_nested_tensors_are_left_alone() -> None:
    model = model_with(torch.ones(2))
    model.parts = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    assert not ModuleSnapshot(model, shards_params=False).restore().values


def test_the_order_of_a_dict_is_restored() -> None:
    model: Any = nn.Module()
    model.cache = {"a": 1, "b": 2}
    snapshot = ModuleSnapshot(model, shards_params=False)
    model.cache["a"] = model.cache.pop("a")
    snapshot.restore()
    assert list(model.cache) == ["a", "b"]
