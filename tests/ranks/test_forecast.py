"""Forecasts against what real ranks hold: data parallel through the accelerator, FSDP2 by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from accel_nb.accelerator import Accelerator
from accel_nb.forecast.layouts import LAYOUTS
from accel_nb.forecast.measurement import default_loss, measure_activations, measure_model
from accel_nb.forecast.memory import MemoryUsage, estimate
from accel_nb.runtime.world import World
from accel_nb.strategies.fsdp.wrap_policy import repeated_blocks
from tests.ranks.launch import run_ranks
from tests.support.measured import held_bytes, peak_bytes
from tests.support.nightly import nightly
from tests.support.transformer import Transformer

NUM_SAMPLES = 8
PARTS = ("parameters", "gradients", "optimizer")


def training() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return Transformer(256, 64, 4, 64), (
        torch.randint(256, (NUM_SAMPLES, 64)),
        torch.randint(256, (NUM_SAMPLES, 64)),
    )


def forecast(name: str, world: int, half: torch.dtype | None, optimizer: str) -> MemoryUsage:
    model, batch = training()
    made = make_optimizer(optimizer, model)
    activations = measure_activations(model, batch, NUM_SAMPLES, half=half)
    layout = next(layout for layout in LAYOUTS if layout.name == name)
    return estimate(measure_model(model, made), layout, world, is_half=half is not None, activations=activations)


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters()) if name == "adamw" else torch.optim.SGD(model.parameters(), 0.1, 0.9)


def peak_without_scratch(run: Callable[[], Any]) -> int:
    """Return `peak_bytes` without oneDNN, which copies weights and inputs for bf16 on some processors only.

    What it takes for a moment is that of one layer, and no part of a forecast.
    """
    with torch.backends.mkldnn.flags(enabled=False):
        return peak_bytes(run)


def trains_in_parallel(world: World, precision: str, optimizer_name: str) -> tuple[dict[str, int], int]:
    model, batch = training()
    optimizer = make_optimizer(optimizer_name, model)
    accelerator = Accelerator(world=world, cpu=True, mixed_precision=precision)
    accelerator.prepare(model, optimizer)

    def step() -> None:
        x, y = batch[0].clone(), batch[1].clone()
        accelerator.backward(default_loss(model(x), (x, y)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    step()
    step()  # DDP builds its buckets anew after the first pass
    held = held_bytes(model, optimizer)
    peak = peak_without_scratch(step)
    accelerator.close()
    return held, peak


@pytest.mark.parametrize(("precision", "half"), [("no", None), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd-momentum"])
def test_data_parallel_ranks_hold_what_was_forecast(precision: str, half: torch.dtype | None, optimizer: str) -> None:
    expected = forecast("ddp", 2, half, optimizer)
    for held, peak in run_ranks(trains_in_parallel, 2, precision, optimizer):
        assert {part: getattr(expected, part) for part in PARTS} == pytest.approx(held, rel=0.1)
        assert expected.activations == pytest.approx(peak, rel=0.25)


def trains_sharded(world: World, half: torch.dtype | None, keeps_gathered: bool, name: str) -> tuple[Any, int]:
    model, batch = training()
    policy: dict[str, Any] = {"reshard_after_forward": not keeps_gathered}
    if half is not None:
        policy["mp_policy"] = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
        model.register_forward_hook(lambda module, args, output: output.float())
        for block in repeated_blocks(model).values():
            block.table = block.table.to(half)  # type: ignore[assignment]
    for block in repeated_blocks(model).values():
        fully_shard(block, **policy)
    fully_shard(model, **policy)
    optimizer = make_optimizer(name, model)

    def step() -> None:
        x, y = batch[0].clone(), batch[1].clone()
        default_loss(model(x), (x, y)).backward()

    step()
    optimizer.step()
    held = held_bytes(model, optimizer)
    optimizer.zero_grad()
    return held, peak_without_scratch(step)


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.nightly), 3])
@pytest.mark.parametrize("half", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", [nightly("fsdp (2)"), "fsdp (3)"])
def test_sharded_ranks_hold_what_was_forecast(name: str, half: torch.dtype | None, size: int) -> None:
    expected = forecast(name, size, half, "adamw")
    results = run_ranks(trains_sharded, size, half, name == "fsdp (2)", "adamw")
    held, _ = results[0]
    assert {part: getattr(expected, part) for part in PARTS} == pytest.approx(held, rel=0.1)
    for _, peak in results:
        assert expected.gradients + expected.activations + expected.communication_buffers == pytest.approx(
            peak, rel=0.25
        )


def perceptron() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    layers = (nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    return nn.Sequential(*layers), (torch.randn(64, 256), torch.randint(10, (64,)))


def passes_of_a_perceptron(world: World) -> dict[str, int]:
    """Return the fullest moment of a forward and backward pass in bf16, where there are no blocks."""
    peaks: dict[str, int] = {}
    for strategy in ("ddp", "fsdp"):
        model, batch = perceptron()
        optimizer = make_optimizer("adamw", model)
        accelerator = Accelerator(world=world, cpu=True, mixed_precision="bf16", strategy=strategy)
        accelerator.prepare(model, optimizer)

        def pass_(accelerator: Accelerator = accelerator, model: nn.Module = model, batch: Any = batch) -> None:
            x, y = batch[0].clone(), batch[1].clone()
            accelerator.backward(default_loss(model(x), (x, y)))

        for _ in range(2):
            pass_()
            optimizer.step()
            optimizer.zero_grad(set_to_none=strategy == "fsdp")
        peaks[strategy] = peak_without_scratch(pass_)
        accelerator.close()
    return peaks


def test_half_precision_is_forecast_where_weights_outweigh_activations() -> None:
    model, batch = perceptron()
    sizes = measure_model(model, make_optimizer("adamw", model))
    activations = measure_activations(model, batch, len(batch[0]), half=torch.bfloat16)
    ddp, fsdp = (
        estimate(sizes, layout, 2, is_half=True, activations=activations)
        for layout in LAYOUTS
        if layout.name in ("ddp", "fsdp (3)")
    )
    for peaks in run_ranks(passes_of_a_perceptron, 2):
        assert ddp.activations == pytest.approx(peaks["ddp"], rel=0.1)
        assert fsdp.gradients + fsdp.activations + fsdp.communication_buffers == pytest.approx(peaks["fsdp"], rel=0.15)
