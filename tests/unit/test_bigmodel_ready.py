"""One line to a model, layers that compute in another dtype, models that take turns."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

import accel_nb
from accel_nb.bigmodel.casting import attach_layerwise_casting_hooks
from accel_nb.bigmodel.sizes import compute_module_sizes
from accel_nb.bigmodel.turns import cpu_offload_with_hook
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
    told = capsys.readouterr().out
    assert "device" in told
    assert "each forward moves" in told
    assert "from disk to cpu" in told


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "neither is given"),
        ({"model_class": Transformer, "builder": Transformer}, "both are given"),
        ({"builder": Transformer, "config": {}}, "config goes with model_class"),
        ({"builder": dict}, "what was built is dict"),
        ({"builder": Transformer, "device_map": "best"}, "'best' is unknown"),
    ],
)
def test_wrong_uses_are_refused(tmp_path: Path, options, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
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
