"""Every flag of ``accelerate launch`` is one of ``accel-nb launch``, or is refused with what replaces it."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from accel_nb.cli.main import main
from accel_nb.config import OPTIONS
from accel_nb.config.accelerate_import import import_accelerate
from accel_nb.errors import ConfigError
from accel_nb.launch.accelerate_flags import EQUIVALENTS, equivalent_of
from accel_nb.launch.job import LaunchJob
from accel_nb.launch.request import FLAGS, LaunchRequest, Machines, read_request

_PARSER = """
import json
from accelerate.commands.launch import launch_command_parser
found = launch_command_parser()._actions
print(json.dumps([name for action in found for name in action.option_strings if name.startswith("--")]))
"""
_OWN = {*FLAGS, *(f"--{option.flag}" for option in OPTIONS.values()), "--help"}


def test_every_flag_is_served_or_has_an_equivalent() -> None:
    pytest.importorskip("accelerate")
    command = [sys.executable, "-W", "ignore", "-c", _PARSER]
    found = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True)
    flags: list[str] = json.loads(found.stdout.splitlines()[-1])
    assert len(flags) > 100
    assert [name for name in flags if name.replace("_", "-") not in _OWN and equivalent_of(name) is None] == []


def test_equivalents_are_flags_that_there_are() -> None:
    named = {word for text in EQUIVALENTS.values() for word in re.findall(r"--[a-z][a-z0-9.-]*[a-z0-9]", text)}
    assert named - _OWN - {"--fp8", "--hostfile"} == set()


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--fsdp_offload_params", "--fsdp.cpu-offload"),
        ("--module", "-m MODULE"),
        ("--fp8_backend", "torchao"),
        ("--megatron_lm_calculate_per_token_loss", "Megatron-LM is not supported"),
    ],
)
def test_a_refused_flag_is_answered(flag: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        read_request([flag, "true", "script.py"])


def imported(path: Path, **values: object) -> LaunchRequest:
    """Return the request of a script with a file of accelerate's."""
    script, file = path / "train.py", path / "default_config.yaml"
    script.write_text("pass\n")
    file.write_text(json.dumps(values))
    return read_request(["--config_file", str(file), str(script)])


def test_a_file_of_the_other_package_sets_the_options_of_a_launch(tmp_path: Path) -> None:
    values = {"num_processes": 3, "use_cpu": True, "mixed_precision": "bf16", "enable_cpu_affinity": True}
    job = LaunchJob.from_request(imported(tmp_path, **values))
    assert (job.resolved.config.precision, len(job.specs)) == ("bf16", 3)
    assert any("enable_cpu_affinity" in note and "is not used" in note for note in job.notes)
    script, file = str(tmp_path / "train.py"), str(tmp_path / "default_config.yaml")
    stronger = LaunchJob.from_request(read_request([f"--config-file={file}", "--cpus", "1", script]))
    assert len(stronger.specs) == 1


def test_a_job_of_a_scheduler_has_the_options_of_the_file(tmp_path: Path) -> None:
    script, file = tmp_path / "train.py", tmp_path / "default_config.yaml"
    script.write_text("pass\n")
    file.write_text(json.dumps({"num_processes": 3, "use_cpu": True, "mixed_precision": "bf16"}))
    words = ["--slurm", "--config-file", str(file), "--cpus", "1", "--name", "run", str(script)]
    text = LaunchJob.from_request(read_request(words)).batch().text
    command = next(node.value for node in ast.parse(text).body if isinstance(node, ast.Assign))
    found = ast.literal_eval(command)
    given = LaunchJob.from_request(read_request(found[found.index("launch") + 1 :])).resolved.config
    assert (given.precision, given.cpus, given.name) == ("bf16", 1, "run")


def test_a_file_of_the_other_package_sets_the_machines_of_a_launch(tmp_path: Path) -> None:
    place = {"machine_rank": 1, "main_process_ip": "10.0.0.1", "main_process_port": 29500, "rdzv_backend": "static"}
    request = imported(tmp_path, num_processes=4, num_machines=2, use_cpu=True, **place)
    assert request.machines == Machines("2", 1, "static", "10.0.0.1:29500")
    assert request.imported is not None
    assert (dict(request.imported.layer.values), request.imported.notes) == ({"cpus": 2}, ())


def test_a_scheduler_connects_the_machines_of_the_file(tmp_path: Path) -> None:
    place = {"machine_rank": 1, "main_process_ip": "10.0.0.1", "main_process_port": 29500, "rdzv_backend": "static"}
    imported(tmp_path, num_processes=4, num_machines=2, use_cpu=True, **place)
    words = ["--slurm", "--config-file", str(tmp_path / "default_config.yaml"), str(tmp_path / "train.py")]
    assert "#SBATCH --nodes=2" in LaunchJob.from_request(read_request(words)).batch().text


def test_the_file_of_deepspeed_that_a_file_names_is_imported_too(tmp_path: Path) -> None:
    engine = tmp_path / "ds.json"
    engine.write_text(json.dumps({"zero_optimization": {"stage": 2}, "gradient_clipping": 0.5}))
    named = {"deepspeed_config_file": str(engine)}
    request = imported(tmp_path, distributed_type="DEEPSPEED", num_processes=1, deepspeed_config=named)
    assert request.imported is not None
    found = request.imported.layer.values
    assert (found["strategy"], found["deepspeed.zero_stage"], found["clip"]) == ("deepspeed", 2, 0.5)


@pytest.mark.parametrize(("text", "words"), [("cpus: 2", "no value of an accelerate config file"), (None, "be read")])
def test_another_file_is_refused(text: str | None, words: str, tmp_path: Path) -> None:
    file, script = tmp_path / "config.yaml", tmp_path / "train.py"
    script.write_text("pass\n")
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_request(["--config_file", str(file), str(script)])


def test_flags_may_have_underscores() -> None:
    with pytest.raises(ConfigError, match="--max-restarts x is not allowed"):
        read_request(["--max_restarts", "x", "train.py"])


def test_the_answer_about_a_flag_that_names_tokens_is_shown_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--megatron_lm_calculate_per_token_loss", "true", "script.py"]) == 2
    assert "***" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("env", "doctor"),
        ("tpu-config", "launch --tpus all"),
        ("estimate-memory", "estimate MODEL"),
    ],
)
def test_a_command_of_the_other_package_is_answered_with_ours(
    command: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command]) == 2
    assert f"instead of accelerate's, use {words}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "options", "left"),
    [
        ({"num_processes": 8, "num_machines": 2, "machine_rank": 0}, 4, "num_machines"),
        ({"num_processes": 2, "num_machines": 1, "machine_rank": 1}, 2, "machine_rank"),
        ({"num_processes": 2, "distributed_type": "MULTI_XPU"}, 2, "distributed_type"),
    ],
)
def test_configurations_of_machines_are_imported(values: dict[str, object], options: int, left: str) -> None:
    found = import_accelerate(values, "default_config.yaml")
    assert found.options["gpus"] == options
    assert left in found.not_imported
