"""Completion in the shell: the printed script is run by the shell itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

from accel_nb.cli.completion import read_commands
from accel_nb.cli.main import COMMANDS, HELP, main

CASES = {
    "accel-nb ": set(COMMANDS) | {"--help"},
    "accel-nb che": {"checkpoint"},
    "accel-nb config ": {"show", "init", "import", "deepspeed", "schema", "docs", "flags"},
    "accel-nb checkpoint ver": {"verify"},
    "accel-nb config show --prec": {"--precision"},
    "accel-nb config deepspeed --zero": {"--zero-stage"},
    "accel-nb config deepspeed --ou": {"--out"},
    "accel-nb config show --precision ": {"no", "fp16", "bf16", "fp8", "auto"},
    "accel-nb config show --gpus 2 --prepa": {"--prepare"},
    "accel-nb config show --no-prepa": {"--no-prepare"},
    "accel-nb config show --metrics.p": {"--metrics.port"},
    "accel-nb config show --max-rest": set(),  # refused by this version
    "accel-nb config init --": {"--out", "--help"},
    "accel-nb checkpoint merge --m": {"--model", "--max-shard-size"},
    "accel-nb estimate --batch-": {"--batch-size"},
    "accel-nb test --": {"--gpus", "--cpus", "--timeout", "--json", "--help"},
    "accel-nb demo --n": {"--notebook"},
}


def test_bash_completes_commands_flags_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    asks = []
    for text in CASES:
        words = text.split(" ")
        quoted = " ".join(f"'{word}'" for word in words)
        asks.append(f'COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _accel_nb; echo "${{COMPREPLY[*]}}"')
    done = subprocess.run(
        ["bash", "--norc", "-uc", "\n".join([script, *asks])], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stderr == ""
    answers = done.stdout.split("\n")[:-1]
    assert {text: set(answer.split()) for text, answer in zip(CASES, answers, strict=True)} == CASES


def test_each_command_is_in_the_help_text_that_completions_come_from() -> None:
    actions, _ = read_commands(HELP)
    assert set(actions) == set(COMMANDS)


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bsh"]) == 2
    assert "'bsh' is no shell; did you mean bash" in capsys.readouterr().err


def test_help_is_there_before_anything_is_imported() -> None:
    program = (
        "import sys; from accel_nb.cli import main; main(['--help']); "
        "heavy = {'pydantic', 'numpy', 'torch', 'yaml', 'IPython'} & set(sys.modules); assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == HELP + "\n"
