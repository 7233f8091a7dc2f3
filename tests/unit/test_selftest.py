"""``accel-nb test`` on real workers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from accel_nb.cli import main
from accel_nb.pool.engine import WorkerSpec
from accel_nb.selftest import run as selftest
from accel_nb.selftest.checks import CHECKS
from accel_nb.selftest.run import CHECK_NAMES, CheckResult, SelfTestReport, run_checks

CPU = WorkerSpec("cpu", 1)


def test_both_sides_list_the_same_checks_and_each_is_documented() -> None:
    assert list(CHECKS) == list(CHECK_NAMES)
    assert all(check.__doc__ for check in CHECKS.values())


def test_every_check_passes_here_and_the_report_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["test", "--cpus", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    assert report["devices"] == ["cpu", "cpu"]
    assert [check["name"] for check in report["checks"]] == ["start", *CHECK_NAMES, "shutdown"]
    assert {check["outcome"] for check in report["checks"]} == {"ok"}


@pytest.mark.nightly
def test_one_worker_passes_too() -> None:
    report = run_checks([CPU], names=["equality", "interrupt", "world"])
    assert report.is_ok, report.as_table()


def test_a_failed_check_is_reported_by_rank_and_the_others_still_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[..., SelfTestReport] = run_checks
    names = ["no such check", "world"]
    monkeypatch.setattr("accel_nb.cli.selftest.run_checks", lambda *args, **more: real(*args, **more, names=names))
    assert main(["test", "--cpus", "2"]) == 1
    printed = capsys.readouterr().out
    assert "no such check  FAILED" in printed
    assert "rank 0: KeyError" in printed
    assert "world          ok" in printed
    assert "3 of 4 checks passed" in printed
    assert "\x1b" not in printed


@pytest.mark.nightly
def test_checks_after_the_deadline_are_reported_as_not_run() -> None:
    report = run_checks([CPU], deadline_s=0.0, names=["world", "triggers"])
    assert [(row.name, row.outcome) for row in report.rows] == [
        ("start", "ok"), ("world", "not run"), ("triggers", "not run"), ("shutdown", "ok")
    ]  # fmt: skip
    assert not report.is_ok


def test_a_check_that_hangs_ends_at_the_deadline() -> None:
    # Without an interrupt, this check waits forever.
    original = selftest._Listener.on_message

    class NeverWaiting(selftest._Listener):
        def on_message(self, *args: Any) -> None:
            original(self, *args)
            self.num_waiting = 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selftest, "_Listener", NeverWaiting)
        deadline_s, outcomes = 4.0, {"interrupt": "not run"}
        while outcomes["interrupt"] == "not run":  # on a busy machine the start alone may take as long
            report = run_checks([CPU, CPU], deadline_s=deadline_s, names=["interrupt", "world"])
            outcomes = {row.name: row.outcome for row in report.rows}
            deadline_s *= 3
    assert (outcomes["interrupt"], outcomes["shutdown"]) == ("failed", "ok")
    assert outcomes["world"] == "not run"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seed", "3"], "takes --cpus N, --gpus N, --timeout SECONDS and --json, and no --seed"),
        (["--cpus", "0"], "cpus: 0"),
        (["--cpu", "1"], "did you mean"),
    ],
)
def test_wrong_use_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["test", *words]) == 2
    assert message in capsys.readouterr().err


def test_the_table_counts_what_passed() -> None:
    report = SelfTestReport(
        ("cpu",),
        (CheckResult("a", "ok", 0.1, "fine"), CheckResult("b", "failed", 0.2, "one\ntwo"), CheckResult("c", "not run")),
    )
    assert report.as_table().splitlines()[-1] == "1 of 3 checks passed in 0 s"
