"""Micro-batches through the devices of a map: equal to the resident model, and really at once."""

from __future__ import annotations

import copy
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_nb.bigmodel.loading.load import load_checkpoint_and_dispatch
from accel_nb.bigmodel.meta import init_empty_weights
from accel_nb.bigmodel.offload.dispatch import dispatch_model, remove_hook_from_submodules
from accel_nb.bigmodel.pipelining.micro_batches import pipeline_devices
from accel_nb.errors import ConfigError, MisuseError
from tests.support.checkpoints import save_single
from tests.support.nightly import nightly
from tests.support.transformer import Transformer

TOKENS = torch.arange(96).reshape(8, 12) % 64
# torch takes numbered CPUs for one device; the map and the turns tell them apart.
MAPS: dict[str, dict[str, Any]] = {
    "two": {"embedding": "cpu:0", "positions": "cpu:0", "blocks.0": "cpu:0", "blocks.1": "cpu:0",
            "blocks.2": "cpu:1", "blocks.3": "cpu:1", "norm": "cpu:1", "head": "cpu:0"},
    "three and the disk": {"embedding": "cpu:0", "positions": "cpu:0", "blocks.0": "cpu:0", "blocks.1": "disk",
                           "blocks.2": "cpu:1", "blocks.3": "cpu:2", "norm": "cpu:2", "head": "cpu:0"},
}  # fmt: skip


@pytest.mark.parametrize("places", list(MAPS))
@pytest.mark.parametrize("num_chunks", [None, nightly(1), 3, nightly(8)])
def test_parts_compute_what_they_compute_alone(tmp_path: Path, places: str, num_chunks: int | None) -> None:
    resident = Transformer()
    with init_empty_weights():
        model = Transformer()
    load_checkpoint_and_dispatch(model, save_single(resident, tmp_path), MAPS[places])
    pipeline_devices(model, 5)
    pipeline_devices(model, num_chunks)
    count = num_chunks or 2 * len({*MAPS[places].values()} - {"disk"})
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            for batch in (TOKENS, TOKENS[:5], TOKENS[:1]):
                own = min(count, len(batch))
                bounds = [len(batch) * at // own for at in range(own + 1)]
                parts = [resident(batch[a:b]) for a, b in pairwise(bounds)]
                output = model(batch)
                assert torch.equal(output, torch.cat(parts))
                assert output.is_inference() == (mode is torch.inference_mode)


def test_devices_compute_at_once_and_each_for_one_part_at_a_time() -> None:
    running: dict[int, int] = {0: 0, 1: 0}
    most = dict(running)
    second_computes, first_again = threading.Event(), threading.Event()

    class Stage(nn.Module):
        def __init__(self, at: int) -> None:
            super().__init__()
            self.at = at
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            running[self.at] += 1
            most[self.at] = max(most[self.at], running[self.at])
            if self.at == 1 and x[0, 0] == 0:  # the first part, on the second device ...
                second_computes.set()
                assert first_again.wait(20), "the first device waited for the second"
            if self.at == 0 and x[0, 0] == 1:  # ... while the second part is on the first
                assert second_computes.wait(20), "the second device waited for the first"
                first_again.set()
            running[self.at] -= 1
            return x * self.scale

    model = nn.Sequential(Stage(0), Stage(1)).requires_grad_(False)
    pipeline_devices(dispatch_model(model, {"0": "cpu:0", "1": "cpu:1"}), 4)
    batch = torch.arange(4.0)[:, None]
    assert torch.equal(model(batch), batch)
    assert most == {0: 1, 1: 1}


def test_gradients_autocast_and_errors_are_those_of_the_caller() -> None:
    resident, model = Transformer(), Transformer()
    model.load_state_dict(resident.state_dict())
    pipeline_devices(dispatch_model(model, MAPS["two"]), 2)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(TOKENS), torch.cat([resident(TOKENS[:4]), resident(TOKENS[4:])]))
    torch.cat([resident(TOKENS[:4]), resident(TOKENS[4:])]).sum().backward()
    model(TOKENS).sum().backward()
    for (name, own), (_, expected) in zip(model.named_parameters(), resident.named_parameters(), strict=True):
        torch.testing.assert_close(own.grad, expected.grad, msg=name)
    for _ in range(3):
        with pytest.raises(IndexError):
            model(TOKENS + 1000)
    with torch.no_grad():
        assert torch.equal(model(TOKENS[:1]), resident(TOKENS[:1])), "no device is left taken"
    remove_hook_from_submodules(model)
    assert "forward" not in model.__dict__


def test_what_cannot_be_pipelined_is_refused() -> None:
    with pytest.raises(MisuseError, match="was not dispatched"):
        pipeline_devices(Transformer())
    with pytest.raises(MisuseError, match="computes on cpu alone"):
        pipeline_devices(dispatch_model(Transformer(), {"": "cpu"}))
    with pytest.raises(ConfigError, match="num_chunks is 0"):
        pipeline_devices(dispatch_model(Transformer(), MAPS["two"]), 0)


def test_batch_normalization_sees_the_whole_batch() -> None:
    resident = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model = copy.deepcopy(resident)
    x = torch.randn(8, 4)
    pipeline_devices(dispatch_model(model, {"0": "cpu:0", "1": "cpu:1"}), 2)
    with pytest.raises(MisuseError, match="batch normalization in training mode"):
        model(x)
    pipeline_devices(model, 1)
    assert torch.equal(model(x), resident(x))
    pipeline_devices(model, 2)
    torch.testing.assert_close(model.eval()(x), resident.eval()(x))
