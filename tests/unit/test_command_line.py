"""What all commands share: help, ``--json``, one line for wrong use, colors on a terminal and nowhere else."""

from __future__ import annotations

import io
import json
import os
import pty
from importlib.metadata import version
from pathlib import Path

import pytest

from accel_nb.cli.colors import STATUS_COLORS, colorize
from accel_nb.cli.main import COMMANDS, main
from accel_nb.notebook.reports.doctor import Finding
from accel_nb.selftest.run import CheckResult, SelfTestReport

ACTIONS = ["config show", "config init", "config import", "config schema", "config docs", "config flags", "runs list"]


@pytest.mark.parametrize("command", [*COMMANDS, *ACTIONS])
def test_every_command_prints_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status: object = main([*command.split(), "--help"])
    except SystemExit as end:  # argparse's own way to say that help was all
        status = end.code
    shown = capsys.readouterr()
    assert (status, shown.err) == (0, "")
    assert f"accel-nb {command}" in shown.out


def test_the_version_is_printed_by_its_flag_and_by_the_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"accel_nb {version('accel_nb')}\n"
    assert main(["doctor"]) == 0
    assert f"[  ok] accel_nb {version('accel_nb')}\n" in capsys.readouterr().out


def test_json_has_the_facts_of_the_text_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*words: str) -> str:
        assert main(words) == 0
        return capsys.readouterr().out

    findings = json.loads(shown("doctor", "--json"))
    assert [str(Finding(**item)).partition(",")[0] for item in findings[:1]] == ["[  ok] platform: a script"]
    assert len(findings) == len(shown("doctor").splitlines())
    options = json.loads(shown("config", "show", "--json", "--gpus", "3"))["options"]
    assert options["gpus"] == {"value": 3, "origin": "--gpus 3 (flags)"}
    assert len(options) >= len(shown("config", "show", "--gpus", "3").splitlines()) > 50
    source = tmp_path / "default_config.yaml"
    source.write_text("compute_environment: LOCAL_MACHINE\nnum_processes: 2\nuse_cpu: true\nmixed_precision: 'no'\n")
    found = json.loads(shown("config", "import", "--json", str(source), "--out", str(tmp_path / "options.yaml")))
    assert set(found) == {"options", "imported", "not_needed", "not_imported"}
    assert found["options"]
    assert (tmp_path / "options.yaml").exists()


def test_wrong_use_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["doctor", "now"], ["config", "schema", "now"], ["completion"], ["runs", "--jsn"], ["checkpoint"]):
        assert main(words) == 2
        shown = capsys.readouterr()
        assert (shown.out, len(shown.err.splitlines())) == ("", 1)


def test_only_terminals_get_colors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    text = SelfTestReport(
        ("cpu",),
        (CheckResult("a", "ok", 0.1, "is ok"), CheckResult("b", "failed", 0.2, "x"), CheckResult("c", "not run")),
    ).as_table()
    text += f"{Finding('ok', 'fine')}\n{Finding('warning', 'the note')}\n"
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb"), os.fdopen(theirs, "w") as terminal:
        shown = colorize(text, terminal)
        monkeypatch.setenv("NO_COLOR", "1")
        assert colorize(text, terminal) == text
    assert colorize(text, io.StringIO()) == text
    plain = shown.replace("\x1b[0m", "")
    for color in set(STATUS_COLORS.values()):
        plain = plain.replace(f"\x1b[{color}m", "")
    assert plain == text
    colored = ["\x1b[32mok", "\x1b[31mFAILED", "\x1b[33mnot run", "[  \x1b[32mok", "[\x1b[33mWARN"]
    assert [mark for mark in colored if mark not in shown] == []
    assert shown.count("\x1b[0m") == len(colored)
