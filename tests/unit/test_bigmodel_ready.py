"""One line to a model, layers that compute in another dtype, models that take turns."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

import accel_nb
from accel_nb.bigmodel.meta import init_empty_weights
from accel_nb.bigmodel.offload.layerwise_casting import attach_layerwise_casting_hooks
from accel_nb.bigmodel.offload.sequential_offload import cpu_offload_with_hook
from accel_nb.bigmodel.planning.forward_cost import measure_forward_cost
from accel_nb.bigmodel.planning.sizes import compute_module_sizes
from accel_nb.errors import ConfigError
from tests.support.checkpoints import save_sharded
from tests.support.transformer import Transformer

TOKENS = torch.arange(24).reshape(2, 12)


def test_one_line_loads_a_model_and_says_what_it_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resident = Transformer(depth=6)
    save_sharded(resident, tmp_path)
    block = compute_module_sizes(resident)["blocks.0"]
    for options in ({"model_class": Transformer, "config": {"depth": 6}}, {"builder": lambda: Transformer(depth=6)}):
        model = accel_nb.load(tmp_path, max_memory={"cpu": 5 * block}, **options)
        assert not model.training
        with torch.no_grad():
            assert torch.equal(model(TOKENS), resident(TOKENS))
    reported = capsys.readouterr().out
    assert "device" in reported
    assert "each forward moves" in reported
    assert "from disk to cpu" in reported
    assert "a forward is expected to take" in reported
    assert "on typical hardware" in reported


def test_room_is_left_for_the_example_and_its_pace_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resident = Transformer(depth=8)
    save_sharded(resident, tmp_path)
    block = compute_module_sizes(resident)["blocks.0"]
    resident_bytes: dict[int, int] = {}
    for batch in (1, 4):
        example = (torch.zeros(batch, 16, dtype=torch.long),)
        model = accel_nb.load(
            tmp_path, Transformer, config={"depth": 8}, max_memory={"cpu": 7 * block}, kv_cache=0, example=example
        )
        resident_bytes[batch] = sum(p.nbytes for p in model.parameters() if not p.is_meta)
        reported = capsys.readouterr().out
        assert "of activations" in reported
        assert re.search(r"a forward is expected to take \S+ s: \S+ s of computing and \S+ s of waiting", reported)
        assert "typical" not in reported, "it was measured"
    costs = [measure_forward_cost(resident, (torch.zeros(batch, 16, dtype=torch.long),)) for batch in (1, 4)]
    assert resident_bytes[1] - resident_bytes[4] >= costs[1].activations - costs[0].activations - block > 0


def test_the_demand_of_a_forward_is_found_without_values() -> None:
    with init_empty_weights():
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    cost = measure_forward_cost(model, (torch.empty(8, 64),))
    assert cost.activations == 2 * 8 * 256 * 4, "before and after the activation function"
    assert cost.flops == 2 * 2 * 8 * 64 * 256
    assert cost.flops_by_module == {"": cost.flops, "0": cost.flops // 2, "2": cost.flops // 2}
    assert (
        measure_forward_cost(model, (torch.empty(8, 64, dtype=torch.bfloat16),), dtype="bfloat16").activations
        == 8 * 256 * 4
    )
    attention = measure_forward_cost(Transformer(), (torch.zeros(2, 16, dtype=torch.long),))
    assert attention.kv_cache == 2 * (2 * 16 * 32) * 4

    class Choosing(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) if input.sum() > 0 else input

    with pytest.raises(ConfigError, match=r"without values: .*give activations="):
        measure_forward_cost(Choosing(2, 2), (torch.ones(1, 2),))


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        ({}, "neither is given"),
        ({"model_class": Transformer, "builder": Transformer}, "both are given"),
        ({"builder": Transformer, "config": {}}, "config is only for model_class"),
        ({"builder": dict}, "load built a dict"),
        ({"builder": Transformer, "device_map": "best"}, "'best' is unknown"),
    ],
)
def test_wrong_uses_are_refused(tmp_path: Path, options, reported: str) -> None:
    with pytest.raises(ConfigError, match=reported):
        accel_nb.load(tmp_path, **options)


def test_layers_are_stored_low_and_compute_high() -> None:
    expected, model = Transformer(), Transformer()
    model.load_state_dict(expected.state_dict())
    for layer in expected.modules():
        if isinstance(layer, nn.Linear | nn.Embedding):
            for parameter in layer.parameters():
                parameter.data = parameter.data.bfloat16().float()
    attach_layerwise_casting_hooks(model, "bfloat16", "float32")
    kept = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with torch.no_grad(), ThreadPoolExecutor(4) as pool:

        def run(_: int) -> torch.Tensor:
            with torch.no_grad():
                return model(TOKENS)

        assert all(torch.equal(output, expected(TOKENS)) for output in pool.map(run, range(12)))
    assert model.blocks[0].up.weight.dtype == torch.bfloat16
    assert model.norm.weight.dtype == torch.float32
    assert all(torch.equal(parameter, kept[name]) for name, parameter in model.named_parameters())
    model(TOKENS).sum().backward()
    assert model.blocks[0].up.weight.grad is not None


def test_layers_may_be_left_alone() -> None:
    model = Transformer()
    attach_layerwise_casting_hooks(model, torch.float8_e4m3fn, torch.float32, ["up$"], [nn.Embedding])
    assert model.blocks[0].up.weight.dtype == torch.float32
    assert model.blocks[0].down.weight.dtype == torch.float8_e4m3fn
    with pytest.raises(ConfigError, match="no linear"):
        attach_layerwise_casting_hooks(nn.LayerNorm(2), "bfloat16", "float32")
    with pytest.raises(ConfigError, match="floating-point"):
        attach_layerwise_casting_hooks(model, "int8", "float32")


def test_models_take_turns() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    expected = second(first(torch.ones(1, 4)))
    first, hook = cpu_offload_with_hook(first, "cpu")
    second, after = cpu_offload_with_hook(second, "cpu", hook)
    assert torch.equal(second(first(torch.ones(1, 4))), expected)
    after.offload()
    after.remove()
    assert not second._forward_pre_hooks
