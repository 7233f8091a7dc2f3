"""Offloaded weights whose memory is used again: what forwards return, what autograd saves, and what fails half way."""

from __future__ import annotations

import copy
import gc
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from accel_nb.bigmodel.offload.dispatch import (
    _dispatch,
    disk_offload,
    dispatch_model,
    has_offloaded_params,
    remove_hook_from_submodules,
)
from accel_nb.bigmodel.offload.layerwise_casting import attach_layerwise_casting_hooks
from accel_nb.bigmodel.offload.sequential_offload import UserCpuOffloadHook
from accel_nb.bigmodel.offload.weight_transfer import DeviceTransfer, HostTransfer, SynchronousCopyQueue
from accel_nb.errors import MisuseError

WIDTH = 64


@pytest.fixture(params=["lent", "copied"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are computed with where they lie in the system's cache, or come through buffers."""
    if request.param == "copied":
        monkeypatch.setattr(HostTransfer, "can_lease", lambda *_, **__: False)


def test_files_of_weights_end_with_the_model(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.ones(1, 4)
    expected = model(x)
    for _ in range(2):
        disk_offload(model, tmp_path)
        assert torch.equal(model(x), expected)
        assert not list(tmp_path.iterdir())
        remove_hook_from_submodules(model)
    gc.collect()
    numbers = [number for number in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{number}")]
    assert not any(os.readlink(f"/proc/self/fd/{number}").startswith(str(tmp_path)) for number in numbers)


class Positions(nn.Module):
    """Returns a view of its parameter, in a structure."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(float(WIDTH * WIDTH)).reshape(WIDTH, WIDTH))

    def forward(self, count: int) -> dict[str, Tensor]:
        return {"rows": self.table[:count]}


class WithPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.positions = Positions()
        self.others = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        rows = self.positions(len(x))["rows"]
        return self.others(x) + rows


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("with_grad", [False, True])
def test_a_module_may_return_a_view_of_its_weight(tmp_path: Path, with_grad: bool) -> None:
    torch.manual_seed(0)
    model, x = WithPositions(), torch.randn(8, WIDTH)
    expected = model(x).detach()
    disk_offload(model, tmp_path)
    with torch.set_grad_enabled(with_grad):
        for _ in range(4):
            assert torch.equal(model(x).detach(), expected)


class Adapter(nn.Module):
    """A layer with an offloaded weight of its own, and a trainable one that stays."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.adapter = nn.Linear(WIDTH, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.adapter(x).sum(-1, keepdim=True)


class WithQuery(nn.Module):
    """Passes its own parameter to another module, which saves it for the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.inner = Adapter()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.query)[: len(x)]


@pytest.mark.usefixtures("way")
def test_an_inner_module_saves_weights_of_the_outer_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(WithQuery(), *(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
    adapter = model[0].inner.adapter.weight  # type: ignore[union-attr]
    model.requires_grad_(False)
    adapter.requires_grad_(True)  # type: ignore[union-attr]
    x = torch.randn(8, WIDTH)
    model(x).square().sum().backward()
    expected, adapter.grad = adapter.grad, None  # type: ignore[union-attr]
    disk_offload(model, tmp_path)
    for _ in range(2):
        model(x).square().sum().backward()
        assert torch.equal(adapter.grad, expected)  # type: ignore[arg-type]
        adapter.grad = None  # type: ignore[union-attr]


def test_saved_weights_are_read_again_on_a_device_with_another_name_than_the_tensors_have() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6))).requires_grad_(False)
    x = torch.randn(8, WIDTH, requires_grad=True)
    model(x).square().sum().backward()
    expected, x.grad = x.grad, None
    lane = DeviceTransfer(torch.device("cpu:0"), SynchronousCopyQueue())
    _dispatch(model, {"": "cpu"}, None, transfer=lane)
    model(x).square().sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, expected)  # type: ignore[arg-type]


class Conjugated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.conj()


class OnGraph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        self.edges = torch.eye(4).to_sparse()

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.edges, x @ self.weight)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("build", [Conjugated, OnGraph])
def test_saved_tensors_that_are_no_plain_views(tmp_path: Path, build: type[Conjugated | OnGraph]) -> None:
    model = build()
    x = torch.randn(4, 4, dtype=model.weight.dtype, requires_grad=True)
    model(x).abs().square().sum().backward()
    expected, x.grad = x.grad, None
    disk_offload(model, tmp_path)
    model(x).abs().square().sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, expected)  # type: ignore[arg-type]


def test_an_interrupt_before_a_read_does_not_block_the_next_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostTransfer, "can_lease", lambda *_, **__: False)
    monkeypatch.setattr(HostTransfer, "benefits_from_prefetch", lambda *_: False)
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)
    expected = model(x)
    disk_offload(model, tmp_path)

    def interrupt(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name == "_fill":
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(x)
    assert torch.equal(model(x), expected)


def test_a_model_keeps_its_weights_if_others_cannot_be_moved(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    expected = {name: value.clone() for name, value in model[0].state_dict().items()}
    with pytest.raises(RuntimeError, match="set_data"):  # as a device without memory raises
        dispatch_model(model, {"0": "disk", "1": "meta"}, "cpu", offload_dir=tmp_path)
    assert not has_offloaded_params(model)
    for name, value in model[0].state_dict().items():
        assert torch.equal(value, expected[name])


def test_a_model_whose_forwards_are_replaced_is_not_copied() -> None:
    models = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)]
    dispatch_model(models[0], {"": "cpu"})
    dispatch_model(models[1], {"0": "cpu:0", "1": "cpu:1"})
    copied = copy.deepcopy(models[0])
    assert torch.equal(copied[0].weight, models[0][0].weight)
    remove_hook_from_submodules(copied)
    with pytest.raises(MisuseError, match="remove_hook_from_submodules"):
        copy.deepcopy(models[1])


def test_a_copy_of_a_layer_that_casts_has_its_own_weights() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    attach_layerwise_casting_hooks(model, "bfloat16", "float32")
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert not copied(torch.ones(1, 4)).any()
    assert model(torch.ones(1, 4)).any()


class ConversionFails(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.to:
            raise torch.OutOfMemoryError("no memory is left")
        return func(*args, **(kwargs or {}))


def test_a_layer_casts_again_after_a_conversion_has_failed() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.ones(1, 4)
    attach_layerwise_casting_hooks(model, "float16", "float32")
    expected = model(x)
    with pytest.raises(torch.OutOfMemoryError), ConversionFails():
        model(x)
    assert torch.equal(model(x), expected)
    assert model[0].weight.dtype == torch.float16


class OtherMemory(TorchFunctionMode):
    """Moves tensors to other memory, as to a device; the move number ``failing`` raises."""

    def __init__(self, failing: int = 0) -> None:
        super().__init__()
        self.num_moves = 0
        self.failing = failing

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.to:
            return func(*args, **(kwargs or {}))
        self.num_moves += 1
        if self.num_moves == self.failing:
            raise torch.OutOfMemoryError("no memory is left")
        return args[0].clone()


def test_what_code_writes_into_data_on_the_device_is_moved_back() -> None:
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    hook = UserCpuOffloadHook(model, torch.device("cpu:0"), None)
    with OtherMemory():
        model(x)
        model.weight.data.fill_(3)
        hook.offload()
    assert model.weight.eq(3).all()


def test_a_model_that_does_not_fit_on_the_device_is_moved_as_a_whole_the_next_time() -> None:
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    expected = model(x)
    UserCpuOffloadHook(model, torch.device("cpu:0"), None)
    with pytest.raises(torch.OutOfMemoryError), OtherMemory(failing=2):
        model(x)
    with OtherMemory() as moves:
        assert torch.equal(model(x), expected)
    assert moves.num_moves == 3, "weight, bias and input"
