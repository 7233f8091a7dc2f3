"""Quantized linear layers: while they are loaded, wherever they lie, and in files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accel_nb
from accel_nb.bigmodel.loading.bnb import BnbQuantizationConfig, load_and_quantize_model
from accel_nb.bigmodel.loading.load import load_checkpoint_in_model
from accel_nb.bigmodel.loading.quantized_files import DESCRIPTION_FILE, quantize_checkpoint, save_quantized
from accel_nb.bigmodel.meta import init_empty_weights
from accel_nb.bigmodel.offload.dispatch import get_prefetcher, remove_hook_from_submodules
from accel_nb.bigmodel.quantization.kernels import METHODS, Quantization
from accel_nb.bigmodel.quantization.quantize import (
    QuantizedLinear,
    quantize_model,
    quantized_layers,
    report_quantization,
)
from accel_nb.bigmodel.safetensors_reader import open_safetensors
from accel_nb.errors import ConfigError
from accel_nb.runtime.process.requirements import unmet_extra
from tests.support.checkpoints import save_sharded, save_single, save_zeros
from tests.support.memory import grown_bytes
from tests.support.nightly import nightly
from tests.support.transformer import Transformer

EXTRAS = ("torchao", "bitsandbytes")

pytestmark = [
    pytest.mark.usefixtures("one_torch_thread"),
    pytest.mark.skipif(any(unmet_extra("quantize", name) for name in EXTRAS), reason="quantization is an extra"),
]

TOKENS = torch.arange(24).reshape(2, 12)
MOST_ERROR = {"int8": 0.02, "int8_dynamic": 0.03, "int4": 0.2, "bnb_int8": 0.03, "nf4": 0.2, "fp4": 0.25}
BYTES = {"int8": 1.2, "int8_dynamic": 1.2, "int4": 0.7, "bnb_int8": 1.1, "nf4": 0.6, "fp4": 0.6}
"""The most that a weight may take, scales included."""


def transformer(**options: Any) -> Transformer:
    torch.manual_seed(1)
    return Transformer(width=64, **options).eval()


def empty(**options: Any) -> Transformer:
    with init_empty_weights():
        return Transformer(width=64, **options)


def outputs(model: nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(TOKENS).float()


def off(model: nn.Module, expected: nn.Module) -> float:
    exact = outputs(expected)
    return float((outputs(model) - exact).norm() / exact.norm())


@pytest.mark.parametrize("method", METHODS)
def test_a_model_is_quantized_as_it_is_loaded_as_if_it_had_been_whole(tmp_path: Path, method: str) -> None:
    whole = transformer()
    save_sharded(whole, tmp_path)
    model = accel_nb.load(tmp_path, lambda: Transformer(width=64), quantization=method, verbose=False)
    assert {type(block.up) for block in model.blocks} == {QuantizedLinear}
    assert type(model.head) is nn.Linear, "the head stays"
    assert 0 < off(model, whole) < MOST_ERROR[method]
    quantize_model(whole, method)
    assert torch.equal(outputs(model), outputs(whole))


@pytest.mark.parametrize("method", METHODS)
def test_memory_and_accuracy_are_reported(method: str) -> None:
    model = transformer()
    before = sum(p.nbytes for p in model.parameters())
    report = report_quantization(quantize_model(model, method))
    after = sum(p.nbytes for p in model.parameters())
    assert before - after == report.nbytes_before - report.nbytes
    assert report.nbytes <= report.nbytes_before / 4 * BYTES[method]
    assert report.errors.keys() == quantized_layers(model).keys()
    assert all(0 < error < MOST_ERROR[method] for error in report.errors.values())
    assert f"{4 * 4} linear layers as {method}" in str(report)
    assert "at most" in str(report)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("place", [nightly("cpu"), "disk"])
def test_quantized_weights_are_saved_and_loaded_again_wherever_they_lie(
    tmp_path: Path, method: str, place: str
) -> None:
    model = quantize_model(transformer(), Quantization(method, nested=method == "nf4"))  # type: ignore[arg-type]
    save_quantized(model, tmp_path / "a")
    again = accel_nb.load(tmp_path / "a", lambda: Transformer(width=64), device_map={"": place}, verbose=False)
    assert (get_prefetcher(again) is not None) == (place == "disk")
    for _ in range(2):
        assert torch.equal(outputs(again), outputs(model))
    save_quantized(again, tmp_path / "b")
    assert sorted(open_safetensors(tmp_path / "b").tensors) == sorted(open_safetensors(tmp_path / "a").tensors)
    remove_hook_from_submodules(again)
    assert torch.equal(outputs(again), outputs(model))


def test_a_checkpoint_is_quantized_without_a_model_in_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = transformer()
    save_sharded(whole, tmp_path)
    report = quantize_checkpoint(empty(), tmp_path, tmp_path / "small", "nf4", dtype="bfloat16")
    assert report.nbytes < report.nbytes_before / 3
    assert len(report.errors) == 16
    model = accel_nb.load(tmp_path / "small", lambda: Transformer(width=64), dtype="bfloat16")
    assert "16 linear layers as nf4" in capsys.readouterr().out
    whole.to(torch.bfloat16)
    assert torch.equal(outputs(model), outputs(quantize_model(whole, "nf4")))
    with pytest.raises(ConfigError, match="not empty"):
        quantize_checkpoint(empty(), tmp_path, tmp_path / "small")
    with pytest.raises(ConfigError, match="quantized weights already"):
        accel_nb.load(tmp_path / "small", lambda: Transformer(width=64), quantization="int8")


def test_gradients_reach_what_lies_before_quantized_layers() -> None:
    model = quantize_model(transformer(), "nf4")
    model(TOKENS).sum().backward()
    assert model.positions.grad is not None


def test_layers_may_be_left_alone() -> None:
    model = quantize_model(transformer(), Quantization(skip_modules=("blocks.0", "mix", "head")))
    assert sorted(quantized_layers(model)) == [
        f"blocks.{at}.{leaf}" for at in (1, 2, 3) for leaf in ("down", "out", "up")
    ]
    whole = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
    with pytest.raises(ConfigError, match="no linear layer is left"):
        quantize_model(whole, "int8")


def test_a_layer_with_several_names_is_quantized_or_skipped_under_all_of_them() -> None:
    def build() -> nn.Module:
        model = nn.ModuleDict({"first": nn.Linear(32, 32), "other": nn.Linear(32, 32)})
        model["second"] = model["first"]
        return model

    model = quantize_model(build(), Quantization("int8", skip_modules=()))
    assert isinstance(model.get_submodule("first"), QuantizedLinear)
    assert model.get_submodule("second") is model.get_submodule("first")
    model = quantize_model(build(), Quantization("int8", skip_modules=("second",)))
    assert quantized_layers(model).keys() == {"other"}


def test_an_error_leaves_the_model_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 64))
    with pytest.raises(ConfigError, match="1 cannot be quantized"):
        quantize_model(model, Quantization("int4", skip_modules=()))
    assert not quantized_layers(model)


@pytest.mark.parametrize("model", [nn.Linear(64, 64), nn.TransformerEncoderLayer(64, 2, 64)])
def test_a_model_that_is_a_layer_itself_has_none_to_replace(model: nn.Module) -> None:
    with pytest.raises(ConfigError, match="no linear layer is left"):
        quantize_model(model, Quantization("int8", skip_modules=()))


def wrong_record(folder: Path, **changes: Any) -> None:
    record = json.loads((folder / DESCRIPTION_FILE).read_text())
    (folder / DESCRIPTION_FILE).write_text(json.dumps({**record, **changes}))


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"version": 2}, "not a record of version 1"),
        ({"method": "int3"}, "int3"),
        ({"method": ["int8"]}, "does not describe how"),
        ({"layers": {"blocks.9.up": "float32"}}, r"not linear layers of the model: blocks\.9\.up"),
        ({"layers": {"blocks.0.up": 3}}, "dtype"),
        ({"layers": []}, "does not describe how"),
        ({"other": 1}, "does not describe how"),
        ({"group_size": 10**9}, "group_size"),
    ],
)
def test_records_that_are_wrong_are_refused(tmp_path: Path, changes: dict[str, Any], reported: str) -> None:
    save_quantized(quantize_model(transformer(), "int8"), tmp_path)
    wrong_record(tmp_path, **changes)
    with pytest.raises(ConfigError, match=reported):
        accel_nb.load(tmp_path, lambda: Transformer(width=64), verbose=False)


def test_wrong_uses_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'int3' is unknown; there are int8"):
        quantize_model(transformer(), "int3")
    with pytest.raises(ConfigError, match="match no module of the model: tail"):
        quantize_model(transformer(), Quantization(skip_modules=("tail",)))
    model = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 64), nn.Linear(64, 8))
    with pytest.raises(ConfigError, match="1 cannot be quantized: its 48 inputs are not a multiple"):
        quantize_model(model, Quantization("int4", skip_modules=("2",)))
    assert [type(layer) for layer in model] == [nn.Linear] * 3
    for whole in (nn.TransformerEncoderLayer(64, 4, batch_first=True), nn.Linear(64, 64)):
        with pytest.raises(ConfigError, match="no linear layer is left"):
            quantize_model(whole, Quantization("int8", skip_modules=()))
    with pytest.raises(ConfigError, match="no quantized layers"):
        save_quantized(transformer(), tmp_path / "a")
    save_single(transformer(), tmp_path)
    with pytest.raises(ConfigError, match=r"cannot stay on disk: blocks\.0\.mix\.weight.*quantize_checkpoint first"):
        accel_nb.load(
            tmp_path, lambda: Transformer(width=64), quantization="int8", device_map={"": "disk"}, verbose=False
        )


@pytest.mark.parametrize(
    ("options", "method"),
    [
        ({"load_in_8bit": True, "torch_dtype": "fp32"}, "bnb_int8"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bf16"}, "nf4"),
        ({"load_in_4bit": True, "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "fp32"}, "fp4"),
    ],
)
@pytest.mark.parametrize("way", ["in place", "loaded", "loaded over values", "on disk"])
def test_the_options_of_bitsandbytes(tmp_path: Path, options: dict[str, Any], method: str, way: str) -> None:
    config = BnbQuantizationConfig(**options)
    expected = quantize_model(transformer().to(config.dtype), config.as_quantization())
    save_single(transformer(), tmp_path)
    if way == "in place":
        model = load_and_quantize_model(transformer(), config)
    elif way == "loaded over values":
        torch.manual_seed(2)
        model = load_and_quantize_model(Transformer(width=64), config, tmp_path)
    else:
        places = {"": "disk" if way == "on disk" else "cpu"}
        model = load_and_quantize_model(empty(), config, tmp_path, places, offload_folder=tmp_path / "away")
    assert report_quantization(model).method == method
    assert torch.equal(outputs(model), outputs(expected))


@pytest.mark.parametrize("skipped", [None, ["head"]])
@pytest.mark.parametrize("kept", ["blocks.0.mix", "mix"])
@pytest.mark.parametrize("way", ["in place", "loaded", "load"])
def test_modules_kept_in_float32_are_not_quantized(
    tmp_path: Path, skipped: list[str] | None, kept: str, way: str
) -> None:
    config = BnbQuantizationConfig(
        load_in_4bit=True, bnb_4bit_compute_dtype="bf16", skip_modules=skipped, keep_in_fp32_modules=[kept]
    )
    save_single(transformer(), tmp_path)
    if way == "in place":
        model = load_and_quantize_model(transformer(), config)
    elif way == "loaded":
        model = load_and_quantize_model(empty(), config, tmp_path, {"": "cpu"})
    else:
        model = accel_nb.load(
            tmp_path, lambda: Transformer(width=64), quantization=config, device_map={"": "cpu"}, verbose=False
        )
    layer = model.get_submodule("blocks.0.mix")
    assert type(layer) is nn.Linear
    assert torch.equal(layer.weight, transformer().get_submodule("blocks.0.mix").weight)  # type: ignore[arg-type]
    assert "head" not in quantized_layers(model)
    assert ("blocks.1.mix" in quantized_layers(model)) == (kept == "blocks.0.mix")


def test_the_options_of_bitsandbytes_refuse_what_does_not_fit() -> None:
    with pytest.raises(ConfigError, match="keep_in_fp32_modules has names that match no module of the model: neck"):
        load_and_quantize_model(transformer(), BnbQuantizationConfig(load_in_8bit=True, keep_in_fp32_modules=["neck"]))
    with pytest.raises(ConfigError, match="neither is set"):
        BnbQuantizationConfig()
    with pytest.raises(ConfigError) as caught:
        BnbQuantizationConfig(True, load_in_4bit=True, bnb_4bit_quant_type="np4", torch_dtype="int8")
    assert len(caught.value.problems) == 3
    with pytest.raises(ConfigError, match="weights_location is not given"):
        load_and_quantize_model(empty(), BnbQuantizationConfig(load_in_8bit=True))


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
@pytest.mark.nightly
def test_the_whole_model_is_never_in_memory(tmp_path: Path) -> None:
    sizes = {"big": {"width": 768, "depth": 12}, "small": {"width": 64}}
    with init_empty_weights():
        models = {name: Transformer(**size) for name, size in sizes.items()}
    for name, model in models.items():
        (tmp_path / name).mkdir()
        save_zeros(model, tmp_path / name)
        quantize_model(model, "int8")
    load_checkpoint_in_model(models["small"], tmp_path / "small")
    grown = grown_bytes(lambda: load_checkpoint_in_model(models["big"], tmp_path / "big"))
    size = (tmp_path / "big/model.safetensors").stat().st_size
    layer = 4 * 768 * 768 * 4
    assert size / 4 * 0.9 < grown < size / 4 * 1.1 + 8 * layer < size * 0.6  # what is made on the way takes some layers
