"""Gradient compression: in effect, close to exact averaging, and the same on every rank."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from accel_nb.accelerator import Accelerator
from accel_nb.config import Layer, resolve
from accel_nb.errors import ConfigError
from accel_nb.runtime.world import World
from tests.ranks.launch import run_ranks

STEPS = 6
# At full rank PowerSGD loses nothing; that takes leave to compress what gets no smaller.
FULL = {"power_sgd_rank": 8, "power_sgd_start": 2, "power_sgd_min_compression": 0.1}


class Partly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.unused = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def batch(rank: int, number: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + rank))


def model_of(whole: bool) -> nn.Module:
    torch.manual_seed(0)
    model = Partly()
    if whole:
        del model.unused
    return model


def trains(world: World, options: dict[str, Any], whole: bool) -> tuple[list[float], list[str], dict[str, Any]]:
    model = model_of(whole)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator = Accelerator(world=world, cpu=True, config={"ddp": options})
    accelerator.prepare(model, optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(STEPS):
            accelerator.backward(model(batch(world.rank, number)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    said = [str(item.message) for item in caught if "took no part" in str(item.message)]
    facts = accelerator.describe()["strategy_options"]
    accelerator.close()
    return torch.cat([p.detach().flatten() for p in model.used.parameters()]).tolist(), said, facts


def by_hand() -> torch.Tensor:
    model = model_of(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            (model(batch(rank, number)).square().mean() / 2).backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"comm_hook": "fp16"}, 1e-3),
        ({"comm_hook": "bf16"}, 1e-2),
        ({"comm_hook": "fp16", "comm_wrapper": "bf16"}, 1e-2),
        ({"comm_hook": "power_sgd", **FULL}, 1e-4),
        ({"comm_hook": "power_sgd", "power_sgd_start": 2, "power_sgd_error_feedback": False}, 1e-1),
        ({"comm_hook": "power_sgd", **FULL, "comm_wrapper": "bf16", "power_sgd_warm_start": False}, 1e-2),
        ({"comm_hook": "power_sgd", **FULL, "find_unused_parameters": True}, 1e-4),
        ({"comm_hook": "fp16", "find_unused_parameters": True}, 1e-3),
        ({"comm_hook": "bf16", "static_graph": True}, 1e-2),
    ],
)
def test_compressed_gradients_keep_ranks_equal_and_close_to_exact(options: dict[str, Any], tolerance: float) -> None:
    first, second = run_ranks(trains, 2, options, True)
    assert first[0] == second[0]
    found, exact = torch.tensor(first[0]), by_hand()
    torch.testing.assert_close(found, exact, rtol=0, atol=tolerance)
    assert (found - exact).abs().max() > 1e-8  # else the hook has not run
    assert first[2]["comm_hook"] == options["comm_hook"]


@pytest.mark.parametrize("hook", ["fp16", "power_sgd"])
def test_unused_parameters_are_found_under_a_hook_too(hook: str) -> None:
    first, second = run_ranks(trains, 2, {"comm_hook": hook, **FULL}, False)
    assert first[0] == second[0]
    torch.testing.assert_close(torch.tensor(first[0]), by_hand(), rtol=0, atol=1e-3)
    assert "unused.weight" in first[1][0]


def test_the_batched_hook_which_torch_cannot_run_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"batched_power_sgd.* is not supported"):
        resolve([Layer("code", {"ddp": {"comm_hook": "batched_power_sgd"}}, "here")])


def test_settings_of_a_hook_that_does_not_run_are_said_to_have_no_effect() -> None:
    given = {"ddp": {"comm_wrapper": "bf16", "power_sgd_rank": 2}}
    notes = resolve([Layer("code", given, "here")]).notes
    assert any("ddp.comm_wrapper" in note and "ddp.comm_hook, which is no" in note for note in notes)
    assert any("ddp.power_sgd_rank" in note and "ddp.comm_hook is no" in note for note in notes)
    given["ddp"]["comm_hook"] = "power_sgd"
    assert resolve([Layer("code", given, "here")]).notes == ()
