"""DeepSpeed's dictionary comes from the options alone, and its own configurations become options, value by value."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from accel_nb.accelerator.options.plugins import DeepSpeedPlugin
from accel_nb.cli.main import main
from accel_nb.config import Layer, resolve
from accel_nb.config.deepspeed_import import import_deepspeed
from accel_nb.config.deepspeed_report import show_deepspeed
from accel_nb.config.deepspeed_settings import settings_for
from accel_nb.config.layers import read_file
from accel_nb.config.sections import DeepspeedOptions
from accel_nb.errors import ConfigError


def settings(num_elements: int = 1000, **options: Any) -> dict[str, Any]:
    resolved = resolve([Layer("code", {f"deepspeed.{name}": value for name, value in options.items()}, "test")])
    return settings_for(resolved.config.deepspeed, num_elements, pins_memory=False)


def test_the_defaults_of_the_schema_are_those_without_a_configuration() -> None:
    assert settings() == settings_for(DeepspeedOptions(), 1000, pins_memory=False)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_stage_has_its_own_settings(stage: int) -> None:
    zero = settings(zero_stage=stage, persistent_size=7)["zero_optimization"]
    assert zero["stage"] == stage
    assert zero["reduce_bucket_size"] == 1000  # no larger than the model
    assert zero.get("stage3_param_persistence_threshold") == (7 if stage == 3 else None)
    assert "offload_optimizer" not in zero


def test_offloading_and_what_is_never_deepspeeds() -> None:
    given = settings(zero_stage=3, offload_optimizer="cpu", offload_parameters="cpu", bucket_size=10)
    zero = given["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": False}
    assert zero["offload_param"]["device"] == "cpu"
    assert zero["allgather_bucket_size"] == 10
    assert (given["gradient_accumulation_steps"], given["gradient_clipping"]) == (1, 0.0)
    assert not given.keys() & {"optimizer", "scheduler", "fp16", "bf16"}
    assert json.loads(json.dumps(given)) == given  # it can be shown, and written


FILE: dict[str, Any] = {
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "reduce_bucket_size": 5e8,
        "sub_group_size": 1e9,
        "stage3_prefetch_bucket_size": "auto",
    },
    "bf16": {"enabled": True},
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "train_batch_size": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}


def test_every_value_of_a_file_is_accounted_for() -> None:
    found = import_deepspeed(FILE, "ds.json")
    assert found.options == {
        "strategy": "deepspeed",
        "deepspeed.zero_stage": 3,
        "deepspeed.offload_optimizer": "cpu",
        "deepspeed.bucket_size": 500_000_000,
        "precision": "bf16",
        "accumulate": 4,
        "clip": 1.0,
    }
    assert set(found.not_imported) == {"optimizer.type", "optimizer.params.lr"}
    table = found.table()
    assert all(
        name in table for name in ("train_batch_size", "not set", "speed and memory only", "LEFT", "in the script")
    )


@pytest.mark.parametrize(
    ("document", "name"),
    [
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "offload_param.device"),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, "fp16.loss_scale"),
        ({"fp16": {"enabled": True, "initial_scale_power": "much"}}, "initial_scale_power"),
    ],
    ids=str,
)
def test_what_cannot_be_is_left_with_its_reason(document: dict[str, Any], name: str) -> None:
    left = import_deepspeed(document, "ds.json").not_imported
    assert [key for key in left if key.endswith(name)]
    with pytest.raises(ConfigError, match=name):
        DeepSpeedPlugin(document).as_options()


@pytest.mark.parametrize("enabled", [True, False, "auto"])
def test_details_of_loss_scaling_need_no_option(enabled: bool | str) -> None:
    details = {"hysteresis": 2, "consecutive_hysteresis": True, "min_loss_scale": 1, "auto_cast": False}
    document = {"zero_optimization": {"stage": 2}, "fp16": {"enabled": enabled, "loss_scale": 0, **details}}
    found = import_deepspeed(document, "ds.json")
    assert found.not_imported == {}
    assert {f"fp16.{name}" for name in details} <= found.not_needed.keys()
    assert found.options.get("precision") == ("fp16" if enabled is True else None)


def test_what_a_section_has_while_it_is_off_needs_no_option() -> None:
    off = {"enabled": False, "profile_step": 1}
    document = {"fp16": {"enabled": False, "loss_scale": 128}, "flops_profiler": off, "bf16": {"enabled": True}}
    found = import_deepspeed(document, "ds.json")
    assert found.not_imported == {}
    assert found.options == {"precision": "bf16"}
    assert found.not_needed["flops_profiler.profile_step"] == "flops_profiler is off"
    assert import_deepspeed({**document, "flops_profiler": {"enabled": True}}, "ds.json").not_imported.keys() == {
        "flops_profiler.enabled"
    }


def test_a_plugin_is_a_view_of_the_options(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}, "gradient_clipping": "auto"}))
    plugin = DeepSpeedPlugin(path, zero_stage=2, gradient_clipping=0.5, offload_optimizer_device="none")
    assert plugin.as_options() == {
        "strategy": "deepspeed",
        "deepspeed.zero_stage": 2,
        "deepspeed.offload_optimizer": "no",
        "clip": 0.5,
    }
    with pytest.raises(ConfigError) as raised:
        DeepSpeedPlugin(path, zero_stage=3, zero3_init_flag=True).as_options()
    assert [word in str(raised.value) for word in (str(path), "zero_stage", "zero3_init_flag")] == [True] * 3


def test_the_command_reads_deepspeeds_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "ds.json", tmp_path / "options.yaml"
    source.write_text(json.dumps(FILE))
    assert main(["config", "import", str(source), "--out", str(out)]) == 0
    assert read_file(out).values["deepspeed"]["zero_stage"] == 3
    assert "zero_optimization.sub_group_size" in capsys.readouterr().out


def shown(**options: Any) -> Any:
    return show_deepspeed(resolve([Layer("code", options, "test")]), on_gpus=False)


@pytest.mark.parametrize(("stage", "offload"), list(itertools.product([1, 2, 3], ["no", "cpu"])))
def test_what_is_shown_accounts_for_every_value_and_reads_back(stage: int, offload: str) -> None:
    given = {"zero_stage": stage, "offload_optimizer": offload, "bucket_size": 1234}
    if stage == 3:
        given["offload_parameters"] = offload
    found = shown(**{f"deepspeed.{name}": value for name, value in given.items()})
    back = import_deepspeed(json.loads(found.json), "ds.json")
    assert {name: back.options.get(f"deepspeed.{name}", "no") for name in given} == given
    table = [line.split()[0] for line in found.table.splitlines()]
    assert {*back.imported, *back.not_needed, *back.not_imported} == set(table)


def test_options_that_are_not_passed_to_deepspeed_are_shown_with_their_origin() -> None:
    found = shown(accumulate=4, clip=0.5, precision="bf16")
    for option in ("accumulate", "clip", "precision"):
        [line] = [line for line in found.table.splitlines() if line.split()[0] == option]
        assert line.split(None, 2)[2].startswith("not passed")
        assert "(test" in line
    assert not found.settings.keys() & {"bf16", "fp16"}
    with pytest.raises(ConfigError, match="strategy is ddp from test"):
        shown(strategy="ddp")


def test_the_command_writes_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "ds.json"
    assert main(["config", "deepspeed", "--zero-stage", "3", "--cpus", "2", "--out", str(out)]) == 0
    assert json.loads(out.read_text())["zero_optimization"]["stage"] == 3
    assert "deepspeed.zero_stage: 3 (--zero-stage 3 (flags))" in capsys.readouterr().out
    assert main(["config", "deepspeed", "--zero-stage", "3", "--out", str(out)]) == 2  # it is kept
    assert main(["config", "deepspeed", "--zero-stag", "3"]) == 2
    assert "--zero-stage" in capsys.readouterr().err
    assert main(["config", "import", str(out)]) == 0
