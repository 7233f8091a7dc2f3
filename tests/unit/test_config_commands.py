"""``accel-nb config init`` and ``import``: a file to begin with, and one brought over value by value."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from accel_nb.cli.main import main
from accel_nb.config.accelerate_import import import_accelerate
from accel_nb.config.layers import read_file
from accel_nb.config.starter_file import starter_file


def foreign(path: Path, **values: object) -> Path:
    """Write a config as accelerate itself does."""
    from accelerate.commands.config.config_args import ClusterConfig  # not for the tests that stand in for it

    values = {"distributed_type": "MULTI_GPU", "mixed_precision": "bf16", **values}
    config = ClusterConfig(compute_environment="LOCAL_MACHINE", use_cpu=False, debug=False, **values)  # type: ignore[arg-type]
    config.to_yaml_file(str(path))
    return path


def test_starter_file_is_one_that_is_read(tmp_path: Path):
    path = tmp_path / "options.yaml"
    path.write_text(starter_file(4, 8))
    assert dict(read_file(path).values) == {"gpus": 4, "precision": "auto"}
    path.write_text(starter_file(0, 8))
    assert dict(read_file(path).values) == {"cpus": 2}


def test_every_commented_option_can_be_set_as_it_stands(tmp_path: Path):
    lines = starter_file(0, 1).splitlines()
    text = "\n".join(re.sub(r"^#((?:  )?[a-z0-9_]+:)", r"\1", line) for line in lines)
    path = tmp_path / "options.yaml"
    path.write_text(text)
    assert len(read_file(path).values) > 20


def test_init_keeps_a_file_that_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "options.yaml"
    assert main(["config", "init", "--out", str(path)]) == 0
    before = path.read_text()
    assert main(["config", "init", "--out", str(path)]) == 2
    assert "already exists and was not changed" in capsys.readouterr().err
    assert path.read_text() == before


def test_import_takes_what_has_an_option_and_accounts_for_every_value(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    source = foreign(
        tmp_path / "default_config.yaml",
        num_processes=2,
        gpu_ids="0,1",
        dynamo_config={"dynamo_backend": "INDUCTOR", "dynamo_use_dynamic": False},
        deepspeed_config={
            "zero_stage": 2,
            "zero_stage_typo": 7,
            "gradient_accumulation_steps": 4,
            "gradient_clipping": 0.5,
        },
    )
    out = tmp_path / "options.yaml"
    assert main(["config", "import", str(source), "--out", str(out)]) == 0
    options = read_file(out).values
    assert options["gpus"] == 2
    assert options["precision"] == "bf16"
    assert options["accumulate"] == 4
    assert options["clip"] == 0.5
    assert options["compile"] == {"backend": "inductor", "dynamic": "no"}
    reported = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert "CUDA_VISIBLE_DEVICES=0,1" in reported["gpu_ids"]
    assert options["deepspeed"] == {"zero_stage": 2}
    assert "LEFT" in reported["deepspeed_config.zero_stage_typo"]
    names = {line.partition(":")[0] for line in source.read_text().splitlines() if re.match(r"[a-z]", line)}
    assert names <= {name.partition(".")[0] for name in reported}


def test_import_of_cpu_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source = foreign(tmp_path / "config.yaml", distributed_type="MULTI_CPU", mixed_precision="no", num_processes=3)
    assert main(["config", "import", str(source)]) == 0
    text = capsys.readouterr().out
    assert "cpus: 3" in text
    assert "gpus: " not in text


@pytest.mark.parametrize(
    "name",
    [
        "fsdp_config.fsdp_transformer_layer_cls_to_wrap", "fsdp_config.fsdp_auto_wrap_policy",
        "dynamo_config.dynamo_use_dynamic", "num_processes", "num_machines", "mixed_precision", "gpu_ids",
    ],
)  # fmt: skip
@pytest.mark.parametrize("value", [5, [5], [[1]], 0.5, True], ids=repr)
def test_import_reports_values_of_wrong_types(name: str, value: object):
    section, _, inner = name.rpartition(".")
    document = {section: {inner: value}} if section else {name: value}
    found = import_accelerate(document, "config.yaml")
    assert len(found.imported) + len(found.not_needed) + len(found.not_imported) == 1


@pytest.mark.parametrize("name", ["transformer_layer_cls_to_wrap", "transformer_cls_names_to_wrap"])
@pytest.mark.parametrize("value", [5, [5]], ids=repr)
def test_import_of_classes_that_are_no_names(name: str, value: object):
    found = import_accelerate({"fsdp_config": {f"fsdp_{name}": value}}, "config.yaml")
    assert found.options == {}
    assert "give class names" in found.not_imported[f"fsdp_config.fsdp_{name}"]


@pytest.mark.parametrize("kind", ["XLA", "TPU"])
def test_import_of_a_tpu(kind: str):
    found = import_accelerate({"distributed_type": kind, "num_processes": 8, "use_cpu": False}, "config.yaml")
    assert found.options == {"strategy": "xla", "tpus": "all"}
    assert found.not_needed["num_processes"] == "one worker drives all chips"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: &x 1\nb: *x\n", "anchors"),
        ("!!python/object:os.system {}\n", "tags"),
        ("- 1\n", "holds a list"),
        ("color: red\n", "has no value of an accelerate config file"),
    ],
)
def test_import_refuses_what_is_no_such_file(
    text: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    source = tmp_path / "config.yaml"
    source.write_text(text)
    assert main(["config", "import", str(source)]) == 2
    assert reason in capsys.readouterr().err
