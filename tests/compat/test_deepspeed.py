"""DeepSpeed under the alias: configurations, placeholders of what they name, and the engine that prepare returns."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_nb.compat.accelerator import Accelerator
from accel_nb.compat.deepspeed.config import (
    DummyOptim,
    DummyScheduler,
    HfDeepSpeedConfig,
    get_active_deepspeed_plugin,
)
from accel_nb.compat.deepspeed.engine import DeepSpeedEngine
from accel_nb.compat.deepspeed.plugin import DeepSpeedPlugin
from accel_nb.compat.states import AcceleratorState
from accel_nb.errors import ConfigError, MisuseError

pytest.importorskip("deepspeed")
ZERO: dict[str, Any] = {"zero_optimization": {"stage": 2}}
NAMED: dict[str, Any] = {
    **ZERO,
    "train_micro_batch_size_per_gpu": "auto",
    "optimizer": {"type": "Adam", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto",
            "warmup_type": "linear",
        },
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def fresh_states() -> Iterator[None]:
    """Clear the shared states."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def test_values_are_read_by_names_with_dots(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "fp16": {}}))
    config = HfDeepSpeedConfig(str(file))
    assert (config.is_zero3(), config.is_zero2(), config.is_offload()) == (True, False, True)
    assert config.get_value("zero_optimization.offload_param.device") == "cpu"
    assert config.get_value("bf16.enabled", 3) == 3
    assert config.find_config_node("bf16.enabled") == (None, "enabled")
    config.del_config_sub_tree("zero_optimization.offload_param", must_exist=True)
    config.set_stage_and_offload()
    assert not config.is_offload()
    with pytest.raises(ValueError, match="amp is not in the DeepSpeed configuration"):
        config.del_config_sub_tree("amp", must_exist=True)
    coded = base64.urlsafe_b64encode(json.dumps(ZERO).encode()).decode()
    assert HfDeepSpeedConfig(coded).config == HfDeepSpeedConfig(json.dumps(ZERO)).config == ZERO
    with pytest.raises(ValueError, match="no existing file and no JSON"):
        HfDeepSpeedConfig("no such file")


def test_fields_and_variables_become_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    monkeypatch.setenv("ACCELERATE_GRADIENT_CLIPPING", "0.5")
    plugin = DeepSpeedPlugin(offload_param_device="cpu")
    assert plugin.get_value("zero_optimization.offload_param.device") == "cpu"
    assert (plugin.zero_stage, plugin.gradient_clipping, plugin.zero3_init_flag) == (3, 0.5, True)
    assert plugin.as_options()["clip"] == 0.5
    assert plugin.is_auto("train_micro_batch_size_per_gpu")
    with pytest.warns(UserWarning, match="zero3_init_flag is for ZeRO stage 3"):
        assert not DeepSpeedPlugin(zero_stage=2, zero3_init_flag=True).zero3_init_flag


def test_a_configuration_fills_the_fields_and_its_numbers_are_kept() -> None:
    plugin = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 1}, "gradient_clipping": "auto"})
    assert (plugin.zero_stage, plugin.gradient_accumulation_steps, plugin.num_steps) == (1, 1, 1)
    with pytest.warns(UserWarning, match="zero_stage=3 of DeepSpeedPlugin has no effect"):
        assert DeepSpeedPlugin(hf_ds_config=ZERO, zero_stage=3).zero_stage == 2
    with pytest.raises(ValueError, match="has no section 'zero_optimization'"):
        DeepSpeedPlugin(hf_ds_config={"train_batch_size": 1})
    with pytest.raises(ConfigError, match="communication_data_type"):
        DeepSpeedPlugin(hf_ds_config={**ZERO, "communication_data_type": "fp32"}).as_options()


def test_values_auto_are_filled_and_others_must_match() -> None:
    plugin = DeepSpeedPlugin(hf_ds_config={**ZERO, "train_batch_size": "auto", "bf16": {"enabled": "auto"}})
    plugin.set_mixed_precision("bf16")
    plugin.deepspeed_config_process(train_batch_size=8, **{"zero_optimization.stage": 2})
    assert (plugin.get_value("train_batch_size"), plugin.get_value("bf16.enabled")) == (8, True)
    with pytest.raises(ValueError, match="train_batch_size is 8 in the configuration and 9 in the code"):
        plugin.deepspeed_config_process(train_batch_size=9)
    plugin.deepspeed_config["train_batch_size"] = "auto"
    with pytest.raises(ValueError, match="train_batch_size of the DeepSpeed configuration is 'auto'"):
        plugin.deepspeed_config_process()
    with pytest.raises(ValueError, match="mixed_precision='fp16', and the DeepSpeed configuration enables bf16"):
        plugin.set_mixed_precision("fp16")


def train(accelerator: Accelerator, optimizer: Any, schedule: Any, model: nn.Module) -> list[float]:
    data = TensorDataset(torch.arange(16.0).reshape(8, 2) / 16, torch.ones(8, 1))
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, DataLoader(data, batch_size=2))
    rates: list[float] = []
    for inputs, targets in loader:
        accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
        norm = accelerator.clip_grad_norm_(model.parameters(), 1e-9)
        assert norm == pytest.approx(model.get_global_grad_norm())
        assert norm > 1e-3
        optimizer.step()
        rates.append(optimizer.param_groups[0]["lr"])
        schedule.step()
        optimizer.zero_grad()
    assert isinstance(model, DeepSpeedEngine)
    assert list(model.state_dict()) == ["weight", "bias"]
    return rates


@pytest.mark.filterwarnings("ignore:clip_grad_norm_ only measures")
@pytest.mark.filterwarnings("ignore:.*there is one worker")
def test_placeholders_are_what_the_configuration_names() -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=NAMED))
    placeholder = DummyOptim(model.parameters(), lr=0.1, weight_decay=0.5)
    rates = train(accelerator, placeholder, DummyScheduler(placeholder, 4, warmup_num_steps=2), model)
    assert rates == pytest.approx([0.0, 0.0, 0.05, 0.1])  # these schedules begin with the first step
    assert [type(item).__name__ for item in accelerator._optimizers] == ["AdamW"]
    assert accelerator._optimizers[0].param_groups[0]["weight_decay"] == 0.5
    plugin = get_active_deepspeed_plugin(accelerator.state)
    assert plugin.get_value("train_micro_batch_size_per_gpu") == 2
    assert plugin.get_value("scheduler.params.total_num_steps") == 4


@pytest.mark.filterwarnings("ignore:clip_grad_norm_ only measures")
@pytest.mark.filterwarnings("ignore:.*there is one worker")
def test_a_schedule_is_made_by_a_function() -> None:
    model = nn.Linear(2, 1)
    config = {name: value for name, value in NAMED.items() if name != "scheduler"}
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    placeholder = DummyOptim(model.parameters(), lr=0.1)

    def halving(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    assert train(accelerator, placeholder, DummyScheduler(placeholder, lr_scheduler_callable=halving), model) == (
        pytest.approx([0.1, 0.1, 0.05, 0.05])
    )


@pytest.mark.filterwarnings("ignore:.*there is one worker")
def test_objects_that_contradict_the_configuration_are_errors() -> None:
    model = nn.Linear(2, 1)
    real = torch.optim.SGD(model.parameters(), 0.1)
    named = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=NAMED))
    with pytest.raises(ValueError, match="got an optimizer, and the DeepSpeed configuration has a section"):
        named.prepare(model, real)
    AcceleratorState._reset_state(True)
    plain = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=ZERO))
    with pytest.raises(ValueError, match="got a DummyOptim, and the DeepSpeed configuration has no section"):
        plain.prepare(model, DummyOptim(model.parameters()))
    with pytest.raises(ValueError, match="give the DummyScheduler lr_scheduler_callable"):
        plain.prepare(model, real, DummyScheduler(real))
    plain.state.deepspeed_plugin.deepspeed_config["zero_optimization"]["stage"] = 1
    with pytest.raises(MisuseError, match=r"Accelerator was built: deepspeed\.zero_stage from 2"):
        plain.prepare(model, real)


@pytest.mark.filterwarnings("ignore:.*there is one worker")
def test_plugins_are_selected_by_name() -> None:
    plugins = {"student": DeepSpeedPlugin(hf_ds_config=ZERO), "teacher": DeepSpeedPlugin(zero_stage=1)}
    first = Accelerator(cpu=True, deepspeed_plugins=plugins)
    assert first.state.deepspeed_plugin is plugins["student"] is first.state.get_deepspeed_plugin("student")
    first.state.select_deepspeed_plugin("teacher")
    assert Accelerator(cpu=True).deepspeed_plugin is plugins["teacher"]
    assert (plugins["student"].selected, plugins["teacher"].selected) == (False, True)
    with pytest.raises(KeyError, match="absent"):
        first.state.select_deepspeed_plugin("absent")
    assert plugins["teacher"].selected
    with pytest.raises(ValueError, match="select_deepspeed_plugin"):
        plugins["student"].select()


@pytest.mark.filterwarnings("ignore:.*there is one worker")
def test_transformers_reads_the_configuration_with_the_precision() -> None:
    theirs = pytest.importorskip("transformers.integrations.deepspeed")
    details = {"loss_scale": 0, "hysteresis": 2, "min_loss_scale": 1}
    config = {**ZERO, "fp16": {"enabled": "auto", **details}, "bf16": {"enabled": "auto"}}
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    assert accelerator.mixed_precision == "bf16"
    found = theirs.deepspeed_config()
    assert (found["fp16"]["enabled"], found["bf16"]["enabled"]) == (False, True)


@pytest.mark.filterwarnings("ignore:.*there is one worker")
def test_an_engine_saves_and_loads_the_training(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))
    model = nn.Linear(2, 1)
    engine, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    before = model.weight.detach().clone()
    assert engine.save_checkpoint(tmp_path)
    assert accelerator.unwrap_model(engine).weight is model.weight
    with torch.no_grad():
        model.weight.zero_()
    assert engine.load_checkpoint(tmp_path) == (str(tmp_path / "global_step0"), {})
    assert torch.equal(model.weight, before)
    assert engine.load_checkpoint(tmp_path / "none") == (None, None)
    assert engine.save_checkpoint(tmp_path, 0, {"epoch": 3, "scores": [0.5, 0.25]})
    assert engine.load_checkpoint(tmp_path, 0) == (str(tmp_path / "0"), {"epoch": 3, "scores": [0.5, 0.25]})
    assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "0")
    assert engine.load_checkpoint(tmp_path, "global_step0")[1] == {}
