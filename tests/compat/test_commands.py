"""The command line of accelerate from a program: a launch, and the file that its notebooks write first."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from accel_nb.compat.launchers import write_basic_config
from accel_nb.config.accelerate_import import import_file
from accel_nb.launch.accelerate_command import launch_command, launch_command_parser
from accel_nb.runtime.process.environment import notebook_variables

SCRIPT = """
import json, pathlib, sys
from accelerate import Accelerator
accelerator = Accelerator()
total = sum(accelerator.gather_object([accelerator.process_index + 1]))
if accelerator.is_main_process:
    pathlib.Path(sys.argv[1]).write_text(json.dumps([total, accelerator.num_processes, sys.argv[2:], __name__]))
accelerator.end_training()
"""

PROGRAM = """
from accel_nb import compat
compat.install()
from accelerate.commands.launch import launch_command, launch_command_parser
launch_command(launch_command_parser().parse_args({words!r}))
"""


WORDS = """
import sys
from accel_nb import compat
compat.install()
from accelerate.commands.launch import main
sys.argv[1:] = {words!r}
main()
"""


@pytest.mark.parametrize("program", [PROGRAM, WORDS], ids=["function", "command"])
def test_a_program_launches_a_script_that_imports_accelerate(tmp_path: Path, program: str) -> None:
    script, out = tmp_path / "train.py", tmp_path / "out.json"
    script.write_text(SCRIPT)
    words = ["--cpus", "2", str(script), str(out), "--lr", "0.1"]
    variables = notebook_variables() | {"XDG_STATE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program.format(words=words)], capture_output=True, text=True, timeout=120, env=variables,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(out.read_text()) == [3, 2, ["--lr", "0.1"], "__main__"]


def test_a_launch_of_a_program_is_submitted_to_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "train.py").write_text("")
    with pytest.raises(SystemExit, match="there is no sbatch on this machine"):
        launch_command(launch_command_parser().parse_args(["--cpus", "2", "--slurm", "train.py"]))
    assert "'accel_nb.compat.program',\n    'train.py'," in (tmp_path / "train.sbatch").read_text()
    assert capsys.readouterr().out == f"wrote {tmp_path / 'train.sbatch'}\n"


def test_words_before_the_script_are_flags_and_others_its_arguments() -> None:
    parsed = launch_command_parser().parse_args(["--cpus", "2", "--no-panel", "train.py", "--cpus", "7"])
    assert (parsed.flags, parsed.module, parsed.training_script) == (["--cpus", "2", "--no-panel"], False, "train.py")
    assert parsed.training_script_args == ["--cpus", "7"]
    parsed = launch_command_parser().parse_args(["-m", "package.train", "x"])
    assert (parsed.module, parsed.training_script, parsed.training_script_args) == (True, "package.train", ["x"])


@pytest.mark.parametrize(
    ("words", "message"),
    [([], "name a script"), (["--cpus", "2"], "name a script"), (["--num_processes", "2", "x.py"], "--gpus")],
)
def test_wrong_words_are_refused_with_what_to_write(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        launch_command_parser().parse_args(words)
    assert message in capsys.readouterr().err


def test_the_file_of_a_notebook_is_not_needed() -> None:
    assert write_basic_config() is False
    with pytest.warns(UserWarning, match="pass mixed_precision to notebook_launcher"):
        write_basic_config(mixed_precision="bf16")


@pytest.mark.parametrize("name", ["made.json", "made.yaml"])
def test_a_file_that_a_program_names_is_written_for_a_launch(name: str, tmp_path: Path) -> None:
    file = tmp_path / "folder" / name
    assert write_basic_config("bf16", file) == file
    assert write_basic_config("no", file) is False
    _, report = import_file(str(file))
    assert (report.options["precision"], report.not_imported) == ("bf16", {})
    assert report.options.keys() & {"cpus", "gpus"}
    with pytest.raises(ValueError, match="give one of no, fp16"):
        write_basic_config("fp12", tmp_path / "other.yaml")


COMMANDS = """
import sys
from accel_nb import compat
compat.install()
from accelerate.commands import accelerate_cli
from accelerate.commands.config import default_config_file, load_config_from_file
from accelerate.commands.config.default import write_basic_config
from accelerate.commands.estimate import create_empty_model, estimate_command_parser
from accelerate.commands.launch import launch_command
import accelerate.utils
path, script, out = sys.argv[1:]
assert launch_command.__module__.startswith("accel_nb")
write_basic_config("bf16", path)
found = load_config_from_file(path)
assert (found.mixed_precision, found.compute_environment) == ("bf16", "LOCAL_MACHINE")
assert isinstance(found.distributed_type, accelerate.utils.DistributedType), found.distributed_type
sys.argv = ["accelerate", "launch", "--cpus", "2", script, out]
accelerate_cli.main()
"""


def test_other_commands_are_those_of_the_real_package_over_our_names(tmp_path: Path) -> None:
    """Programs read the file of ``accelerate config``, and start the command line from Python."""
    script, out = tmp_path / "train.py", tmp_path / "out.json"
    script.write_text(SCRIPT)
    variables = notebook_variables() | {"XDG_STATE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, str(tmp_path / "config.json"), str(script), str(out)],
        capture_output=True, text=True, timeout=120, env=variables, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(out.read_text()) == [3, 2, [], "__main__"]
