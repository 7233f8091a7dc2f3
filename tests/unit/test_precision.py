"""Precision and device: what auto means, and that scales stay right in odd orders of calls."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from accel_nb.errors import ConfigError
from accel_nb.precision import build_precision
from accel_nb.precision.choice import choose_precision
from accel_nb.runtime.devices.registry import device_type


def test_auto_is_full_precision_on_the_cpu() -> None:
    assert choose_precision("auto", "cpu") == "no"
    assert build_precision("auto", "cpu").policy.name == "no"


@pytest.mark.parametrize(("capability", "expected"), [("AVX2", False), ("AVX512", True), ("SVE256", True)])
def test_bf16_on_the_cpu_needs_its_instructions(
    monkeypatch: pytest.MonkeyPatch, capability: str, expected: bool
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert device_type("cpu").has_real_bf16("cpu") is expected


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), "fp16"), ((8, 0), "bf16"), ((9, 0), "bf16")])
def test_auto_on_cuda_follows_the_compute_capability(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert choose_precision("auto", "cuda:0") == expected


def test_unknown_precision_is_refused() -> None:
    with pytest.raises(ConfigError, match="fp7"):
        build_precision("fp7", "cpu")


def test_memory_of_the_cpu_is_that_of_the_process() -> None:
    found = device_type("cpu").memory("cpu")
    assert 0 < found.allocated < found.total
    assert 0 < found.free <= found.total


def _fp16() -> tuple[Any, torch.nn.Parameter, torch.optim.Optimizer]:
    weight = torch.nn.Parameter(torch.ones(2))
    return build_precision("fp16", "cpu"), weight, torch.optim.SGD([weight], lr=1.0)


def test_gradients_are_true_after_unscaling_twice() -> None:
    precision, weight, optimizer = _fp16()
    precision.scale(weight.sum()).backward()
    precision.unscale_(optimizer)
    precision.unscale_(optimizer)
    assert weight.grad is not None
    assert weight.grad.tolist() == [1.0, 1.0]
    assert precision.step(optimizer)
    assert weight.tolist() == [0.0, 0.0]


def test_next_step_is_unscaled_when_a_clipped_one_was_thrown_away() -> None:
    precision, weight, optimizer = _fp16()
    precision.scale(weight.sum()).backward()
    precision.unscale_(optimizer)
    optimizer.zero_grad()
    precision.scale(weight.sum()).backward()
    assert precision.step(optimizer)
    assert weight.tolist() == [0.0, 0.0]


def test_second_optimizer_is_unscaled_by_the_same_scale_when_the_first_overflowed() -> None:
    precision, weight, optimizer = _fp16()
    other = torch.nn.Parameter(torch.ones(1))
    other_optimizer = torch.optim.SGD([other], lr=1.0)
    precision.scale(weight.sum() * torch.inf + other.sum()).backward()
    assert not precision.step(optimizer)
    assert precision.step(other_optimizer)
    assert other.tolist() == [0.0]
    assert precision.state_dict()["scale"] < 65536


def test_optimizers_that_stepped_or_were_clipped_are_freed() -> None:
    precision, weight, optimizer = _fp16()
    other = torch.nn.Parameter(torch.ones(1))
    clipped: Any = torch.optim.SGD([other], lr=1.0)
    precision.scale(weight.sum() + other.sum()).backward()
    precision.unscale_(clipped)
    assert precision.step(optimizer)
    references = [weakref.ref(item) for item in (optimizer, clipped)]
    del optimizer, clipped
    gc.collect()

    assert [reference() for reference in references] == [None, None]
    weight.grad = None
    following = torch.optim.SGD([weight], lr=1.0)
    precision.scale(weight.sum()).backward()
    assert precision.step(following)
    assert weight.tolist() == [-1.0, -1.0]


def test_scale_survives_its_state_dict() -> None:
    precision, weight, optimizer = _fp16()
    precision.scale(weight.sum() * torch.inf).backward()
    assert not precision.step(optimizer)
    fresh, *_ = _fp16()
    fresh.load_state_dict(precision.state_dict())
    assert fresh.scale(torch.ones(())) == precision.scale(torch.ones(()))
