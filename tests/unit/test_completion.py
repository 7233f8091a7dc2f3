"""Completion in the shell: the printed script is run by the shell itself, where it is installed."""

from __future__ import annotations

import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from accel_nb.cli.completion import SCRIPT_WRITERS, read_commands
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
    "accel-nb config show --max-rest": {"--max-restarts"},
    "accel-nb config init --": {"--out", "--help"},
    "accel-nb checkpoint merge --m": {"--model", "--max-shard-size"},
    "accel-nb estimate --batch-": {"--batch-size"},
    "accel-nb test --": {"--gpus", "--cpus", "--timeout", "--json", "--help"},
    "accel-nb demo --n": {"--notebook"},
}


def _ask_bash(script: Path) -> list[str]:
    asks = [f"source {script}"]
    for text in CASES:
        words = text.split(" ")
        quoted = " ".join(f"'{word}'" for word in words)
        asks.append(f'COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _accel_nb; echo "${{COMPREPLY[*]}}"')
    return _output(["bash", "--norc", "-uc", "\n".join(asks)])


def _ask_fish(script: Path) -> list[str]:
    asks = [f"source {script}", *(f"echo (complete -C '{text}' | string split -f 1 \\t)" for text in CASES)]
    return _output(["fish", "--no-config", "-c", "; ".join(asks)])


def _ask_zsh(script: Path) -> list[str]:
    """Complete each text with the line editor of an interactive zsh, which needs a terminal."""
    answers = script.with_suffix(".answers")
    asks = "\n".join(f"BUFFER='{text}'; CURSOR=$#BUFFER; zle ask" for text in CASES)
    program = f"""
autoload -U compinit; compinit -u -D; source {script}
compadd() {{ builtin compadd -O found "$@" }}
ask() {{ local -a found; _accel_nb; print -r -- $found >> {answers} }}
zle -C ask complete-word ask
zle-line-init() {{ {asks}
zle send-break }}
zle -N zle-line-init
vared -c line
exit
"""
    script.with_suffix(".asks").write_text(program)
    ours, theirs = pty.openpty()
    try:
        variables = {**os.environ, "TERM": "dumb", "HOME": str(script.parent)}
        command = ["zsh", "-f", "-i", "-c", f"source {script.with_suffix('.asks')}"]
        subprocess.run(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=variables, timeout=60, start_new_session=True
        )
    finally:
        os.close(ours)
        os.close(theirs)
    return answers.read_text().splitlines()


def _output(command: list[str]) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    return done.stdout.splitlines()


ASK = {"bash": _ask_bash, "fish": _ask_fish, "zsh": _ask_zsh}


@pytest.mark.parametrize("shell", ASK)
def test_a_shell_completes_commands_flags_and_values(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert main(["completion", shell]) == 0
    script = tmp_path / f"completion.{shell}"
    script.write_text(capsys.readouterr().out)
    answers = ASK[shell](script)
    assert {text: set(answer.split()) for text, answer in zip(CASES, answers, strict=True)} == CASES


def test_every_script_offers_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    offered: dict[str, set[str]] = {}
    for shell in SCRIPT_WRITERS:
        assert main(["completion", shell]) == 0
        offered[shell] = set(re.findall(r"--[a-z][a-z.-]+", capsys.readouterr().out))
    assert set(SCRIPT_WRITERS) == set(ASK)
    assert offered["bash"] == offered["zsh"] == offered["fish"] > {"--precision", "--no-prepare", "--metrics.port"}


def test_each_command_is_in_the_help_text_that_completions_come_from() -> None:
    actions, _ = read_commands(HELP)
    assert set(actions) == set(COMMANDS)


def test_an_unknown_shell_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bsh"]) == 2
    assert "'bsh' is not a shell; did you mean bash" in capsys.readouterr().err


def test_help_imports_no_heavy_modules() -> None:
    program = (
        "import sys; from accel_nb.cli import main; main(['--help']); "
        "heavy = {'pydantic', 'numpy', 'torch', 'yaml', 'IPython'} & set(sys.modules); assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == HELP + "\n"
