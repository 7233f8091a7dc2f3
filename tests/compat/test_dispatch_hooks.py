"""Hooks of dispatched models under the alias: libraries load and change offloaded weights by them, as PEFT does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_nb.compat.models.align_hooks import AlignDevicesHook
from accel_nb.compat.models.big_models import disk_offload, dispatch_model
from accel_nb.compat.models.model_hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from accel_nb.compat.models.module_tensors import align_module_device, has_offloaded_params, named_module_tensors
from accel_nb.runtime.tensors.instance_patching import bound_forward, replace_forward


class Block(nn.Module):
    """Two layers that are loaded together if the model repeats the block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(4, 2)).eval()


@torch.no_grad()
@pytest.mark.parametrize("assigns", [False, True], ids=["in place", "by its data"])
def test_weights_that_a_library_changes_between_the_calls_are_kept(tmp_path: Path, model: Any, assigns: bool) -> None:
    x = torch.randn(3, 4)
    dispatch_model(model, {"0": "cpu", "1": "disk", "2": "disk"}, main_device="cpu", offload_dir=tmp_path)
    before = model(x)
    layer = model[1].up
    hook = layer._hf_hook
    assert isinstance(hook, AlignDevicesHook)
    assert hook.offload
    assert layer.weight.is_meta
    hook.pre_forward(layer)
    original = layer.weight.detach().clone()
    if assigns:
        layer.weight.data = original * 2
    else:
        layer.weight.data += original
    hook.weights_map = {name: tensor.to("cpu") for name, tensor in named_module_tensors(layer)}
    hook.post_forward(layer, torch.tensor([]))
    assert layer.weight.is_meta
    changed = [model(x) for _ in range(2)]
    assert not torch.equal(changed[0], before)
    assert torch.equal(*changed)
    assert torch.equal(hook.weights_map["weight"], original * 2)
    remove_hook_from_module(model, recurse=True)
    assert not hasattr(layer, "_hf_hook")
    assert torch.equal(layer.weight, original * 2)
    assert torch.equal(model(x), changed[0])


def test_weights_are_on_their_device_inside_of_the_block_only(tmp_path: Path, model: Any) -> None:
    expected = model[2].weight.detach().clone()
    disk_offload(model, tmp_path, "cpu")
    layer = model[2]
    assert has_offloaded_params(layer)
    assert not has_offloaded_params(model)
    with align_module_device(layer):
        assert torch.equal(layer.weight, expected)
    assert layer.weight.is_meta


def test_a_hook_is_removed_after_its_model_was_prepared() -> None:
    model = add_hook_to_module(nn.Linear(2, 1), ModelHook())
    expected = model(torch.ones(1, 2))
    replace_forward(model, bound_forward(model))  # as a strategy of several ranks does
    remove_hook_from_module(model)
    assert torch.equal(model(torch.ones(1, 2)), expected)
