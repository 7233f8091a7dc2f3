"""The registry of runs: what is kept, what is found again, and what a damaged or read-only folder does."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from accel_nb.cli.main import main
from accel_nb.config import Layer, Resolved, resolve
from accel_nb.errors import ConfigError
from accel_nb.notebook.session.recording import end_of_run, record_run
from accel_nb.runs import Run, RunRegistry, default_folder
from accel_nb.runs.labels import RunLabels
from accel_nb.runs.record import read_metrics, read_run
from accel_nb.runtime.strict_json import parse_strict_json
from accel_nb.telemetry.events import CheckpointSaved, MetricLogged, StepDone
from accel_nb.telemetry.trackers.jsonl import JsonlTracker
from accel_nb.ui.view import PanelState


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunRegistry:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return RunRegistry()


def options(**values: object) -> Resolved:
    return resolve([Layer("flags", values, "command line")])


def test_a_run_is_kept_with_all_that_is_known_of_it(registry: RunRegistry):
    assert registry.folder == default_folder()
    recording = registry.begin("launch", "train.py", options(accumulate=4), args=("--lr", "0.1"))
    assert registry.find("last").outcome == "running"
    assert recording.folder is not None
    assert stat.S_IMODE(recording.folder.stat().st_mode) == 0o700
    tracker = JsonlTracker("metrics", recording.folder)
    tracker.start()
    tracker.log({"loss": 2.0}, 1)
    tracker.log({"loss": float("nan")}, 2)
    tracker.log({"accuracy": 0.5, "checkpoint": "runs/step_3"}, 3)
    tracker.finish()
    (recording.folder / "metrics.jsonl").open("a").write('{"step": 4, "values": {"loss"')  # cut off in the middle
    recording.finish("failed", exit_code=1, error="ValueError: x")
    run = registry.find(recording.run.id[-6:])
    assert (run.name, run.outcome, run.exit_code, run.error) == ("train", "failed", 1, "ValueError: x")
    assert run.config == {"accumulate": (4, "command line (flags)")}
    assert (run.num_steps, run.checkpoints, run.metrics["accuracy"]) == (3, ("runs/step_3",), 0.5)
    assert run.metrics["loss"] != run.metrics["loss"]
    assert len(read_metrics(recording.folder)) == 3
    assert set(run.environment["packages"]) >= {"torch"}
    assert run.duration_s is not None


def test_a_run_is_kept_without_secrets(registry: RunRegistry):
    token = "hf_" + "x" * 30
    args = ("--hf-token", "short", f"--note={token}", "--lr", "0.1")
    recording = registry.begin("launch", "train.py", options(), args=args)
    recording.finish("failed", error=f"no access with {token}")
    run = registry.find("last")
    assert run.args == ("--hf-token", "***", "--note=***", "--lr", "0.1")
    assert run.error == "no access with ***"


def test_runs_are_found_by_name_and_part_of_an_id(registry: RunRegistry):
    first, second = (registry.begin("launch", "a.py", options(name=name)).run for name in ("one", "two"))
    assert registry.find("one").id == first.id
    assert registry.find(second.id) == registry.find("two")
    with pytest.raises(ConfigError, match="matches 2 runs; write more of the id"):
        registry.find(first.id[:4])
    with pytest.raises(ConfigError, match="there is no run 'three'"):
        registry.find("three")


def test_damaged_runs_are_passed_over_and_names_cannot_leave_the_folder(registry: RunRegistry, tmp_path: Path):
    kept = registry.begin("launch", "a.py", options()).run
    for number, text in enumerate(["", "[]", '{"version": 1}', "[" * 100_000, json.dumps({"version": 9})]):
        folder = registry.folder / f"20200101-00000{number}-abcdef"
        folder.mkdir()
        (folder / "run.json").write_text(text)
    forged = registry.folder / "20200102-000000-abcdef"
    forged.mkdir()
    (forged / "run.json").write_text(Run("../../etc", "x", "cell", "y", 0.0).to_json())
    assert [run.id for run in registry.runs()] == [kept.id]
    with pytest.raises(ConfigError, match="cannot be read"):
        registry.find("20200102-000000-abcdef")
    with pytest.raises(ConfigError, match="there is no run"):
        registry.find("../../etc")


def test_a_folder_that_cannot_be_written_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "accel_nb").write_text("a file, not a folder")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    recording = RunRegistry().begin("launch", "a.py", options())
    assert recording.folder is None
    recording.finish("done")
    assert "runs are not recorded" in caplog.text


def test_a_run_whose_folder_was_deleted_is_kept(registry: RunRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    registry.begin("launch", "train.py", resolve([])).finish("done")
    assert [run.environment["folder"] for run in registry.runs()] == [""]


def test_a_cell_that_trained_is_recorded_and_another_is_not(registry: RunRegistry):
    state = PanelState("digits", 1)
    record_run("print(1)", options(), state, end_of_run(state, 1.0, None))
    assert registry.runs() == []
    state.apply([StepDone(0, step, float(step), 1.0 / step, 0.1, 0.01, 4) for step in (1, 2)])
    state.apply([MetricLogged(0, 2, 2.0, "accuracy", 0.75), CheckpointSaved(0, 2, 2.0, "runs/step_2", 0.1, 0.2, 3)])
    end = end_of_run(state, 1.0, KeyboardInterrupt())
    record_run("# %%accelerate\nimport x\ntrain()", options(cpus=2), state, end)
    (run,) = registry.runs()
    assert (run.kind, run.name, run.target, run.outcome) == ("cell", "digits", "train()", "interrupted")
    assert (run.num_steps, run.metrics, run.checkpoints) == (2, {"loss": 0.5, "accuracy": 0.75}, ("runs/step_2",))


def test_the_command_lists_shows_compares_and_opens(registry: RunRegistry, capsys: pytest.CaptureFixture[str]):
    def reported(*words: str) -> str:
        assert main(["runs", *words]) == 0
        return capsys.readouterr().out

    assert "no run is recorded" in reported("list")
    runs = [
        registry.begin("launch", f"{name}.py", options(accumulate=size), name=name)
        for name, size in (("a", 1), ("b", 2))
    ]
    runs[0].finish("done", metrics={"loss": 0.25})
    runs[1].finish("failed", exit_code=3, error="first\n\x1b[31msecond", metrics={"loss": 0.5})
    lines = reported("list").splitlines()
    assert [line.split()[1] for line in lines[1:]] in (["a", "b"], ["b", "a"])
    text = reported("show", "b")
    assert "failed, exit code 3" in text
    assert "accumulate = 2 from command line (flags)" in text
    assert "\x1b" not in text
    text = reported("compare", "a", "b")
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines()[1:]}
    assert rows["accumulate"] == ["1", "2"]
    assert rows["loss"] == ["0.25", "0.5"]
    assert "python" not in rows
    assert json.loads(reported("compare", "a", "b", "--json"))["differ"]["accumulate"] == ["1", "2"]
    assert json.loads(reported("list", "--json", "--limit", "1"))[0]["id"] in {item.run.id for item in runs}
    assert reported("open", "a").strip() == str(runs[0].folder)


def test_labels_are_kept_beside_the_record(registry: RunRegistry, monkeypatch: pytest.MonkeyPatch):
    recording = registry.begin("cell", "train()", options(), name="digits", notebook="/home/ada/digits.ipynb")
    before = registry.fingerprint(5)
    run = registry.set_labels(recording.run, {"name": " wide ", "tags": ["a", " a", "b c"], "is_starred": True})
    assert registry.fingerprint(5) != before, "the sidebar reads the list again"
    recording.finish("done", metrics={"loss": 0.5})
    assert registry.find("wide").labels == run.labels == RunLabels("wide", "", ("a", "b c"), is_starred=True)
    assert (registry.find("digits").outcome, registry.find("last").notebook) == ("done", "/home/ada/digits.ipynb")
    for wrong in ({"name": "a\nb"}, {"name": 3}, {"tags": ["x,y"]}, {"tags": "x"}, {"is_starred": 1}, {"color": "red"}):
        with pytest.raises(ConfigError):
            registry.set_labels(run, {"notes": "changed", **wrong})
    assert registry.find("wide").labels.notes == "", "a refusal changes nothing"
    monkeypatch.setattr("accel_nb.runs.registry.MAX_RUNS", 2)
    later = [registry.begin("cell", "train()", options(), started=4e9 + number).run.id for number in range(4)]
    assert registry.ids() == [*reversed(later[2:]), run.id], "a star keeps a run"
    assert registry.recent_ids(1) == [later[3], run.id]
    (registry.folder / run.id / "labels.json").write_text("[")
    assert registry.runs()[-1].title == "digits"


def test_the_table_is_sorted_and_filtered_and_runs_are_labeled(
    registry: RunRegistry, capsys: pytest.CaptureFixture[str]
):
    for name, loss in (("a", 0.5), ("b", 0.25), ("c", math.nan)):
        recording = registry.begin("cell", "train()", options(), name=name, notebook=f"/home/{name}.ipynb")
        recording.finish("done", metrics={"loss": loss})
    registry.begin("launch", "d.py", options(), name="d")

    def listed(*words: str) -> list[str]:
        assert main(["runs", "list", "--json", *words]) == 0
        return [run["name"] for run in json.loads(capsys.readouterr().out)]

    assert sorted(listed()) == ["a", "b", "c", "d"]
    assert listed("--sort", "loss")[:2] == ["b", "a"]
    assert listed("--sort", "loss", "--reverse")[:2] == ["a", "b"]
    assert listed("--sort", "name", "--limit", "2") == ["a", "b"]
    assert listed("--notebook", "b.ipynb") == ["b"]
    assert main(["runs", "label", "b", "--name", "best", "--tag", "x", "--tag", "y", "--star", "--notes", "wide"]) == 0
    assert "* best [x] [y]" in capsys.readouterr().out
    assert listed("--starred") == listed("--tag", "y") == ["b"]
    assert main(["runs", "label", "best", "--untag", "y", "--unstar"]) == 0
    assert main(["runs", "show", "best"]) == 0
    shown = capsys.readouterr().out
    assert "wide" in shown
    assert "y" not in shown.split("tags")[1].splitlines()[0]
    assert listed("--starred") == []


def test_reverse_lists_the_earliest_run_first(registry: RunRegistry, capsys: pytest.CaptureFixture[str]):
    for day, name in enumerate("abc", 1):
        registry.begin("cell", "train()", options(), name=name, started=day * 86400.0)

    def listed(*words: str) -> list[str]:
        assert main(["runs", "list", "--json", *words]) == 0
        return [run["name"] for run in json.loads(capsys.readouterr().out)]

    assert listed() == ["c", "b", "a"]
    assert listed("--reverse") == listed("--sort", "started", "--reverse") == ["a", "b", "c"]
    assert listed("--reverse", "--limit", "1") == ["a"]


def test_json_output_has_names_for_numbers_that_json_lacks(registry: RunRegistry, capsys: pytest.CaptureFixture[str]):
    recording = registry.begin("cell", "train()", options())
    recording.finish("done", metrics={"loss": math.nan, "ratio": -math.inf, "accuracy": 0.5})
    for words, read in ((["list"], lambda facts: facts[0]), (["show", "last"], lambda facts: facts)):
        assert main(["runs", *words, "--json"]) == 0
        facts = parse_strict_json(capsys.readouterr().out.encode())
        assert read(facts)["metrics"] == {"loss": "nan", "ratio": "-inf", "accuracy": 0.5}


def test_a_cell_ends_with_an_error_that_has_no_text():
    class Wordless(Exception):
        def __str__(self) -> str:
            raise ValueError

    end = end_of_run(PanelState("digits", 1), 1.0, Wordless())
    assert (end.error or "").startswith("Wordless: <")


def test_a_cell_keeps_a_small_chart_of_its_loss_and_metrics(registry: RunRegistry):
    state = PanelState("long", 2)
    for step in range(1, 5001):
        loss = math.nan if step == 5000 else 9.0 if step == 2500 else 1 / step
        state.apply([StepDone(rank, step, float(step), loss + rank, 0.1, 0.01, 4) for rank in (0, 1)])
    state.apply([MetricLogged(0, 5000, 1.0, "loss", 0.25), MetricLogged(0, 5000, 1.0, "accuracy", 0.75)])
    state.tables.table("plan", 0, "0").append((1.0, 0.1))
    state.finish("done")
    record_run("train()", options(), state, end_of_run(state, 1.0, None))
    (run,) = registry.runs()
    rows = read_metrics(registry.folder / run.id)
    losses = [values["loss"] for _, values in rows if "loss" in values]
    assert len(rows) < 500
    assert max(value for value in losses if value == value) == 9.5, "the mean of both ranks, with its spike"
    assert 0.25 not in losses, "a logged metric is no part of the loss's curve"
    assert [values for _, values in rows if "loss (logged)" in values][-1] == {"loss (logged)": 0.25}
    assert (run.metrics["accuracy"], run.metrics["loss (logged)"]) == (0.75, 0.25)
    assert "0" not in {name for _, values in rows for name in values}, "a planned learning rate is no metric"
    assert run.num_steps == 5000
    assert "nan" in main_says(["runs", "list"]), "a loss that is not finite is a number"


def main_says(words: list[str]) -> str:
    reported = io.StringIO()
    with contextlib.redirect_stdout(reported):
        assert main(words) == 0
    return reported.getvalue()


def test_long_metrics_are_looked_at_in_places_with_their_last_line(registry: RunRegistry):
    recording = registry.begin("launch", "train.py", options())
    assert recording.folder is not None
    recording.log((step, {"train_loss": 1 / step}) for step in range(1, 20_001))
    whole, sampled = read_metrics(recording.folder), read_metrics(recording.folder, sampled=True)
    assert len(whole) == 20_000
    assert len(sampled) < 4000
    assert set(map(repr, sampled)) <= set(map(repr, whole)), "no line that was cut"
    assert sampled[-1] == whole[-1]
    steps = [step for step, _ in sampled if step is not None]
    assert steps == sorted(steps)
    assert max(after - before for before, after in itertools.pairwise(steps)) < 1000
    assert read_run(recording.folder, sampled=True).num_steps == 20_000


@pytest.mark.parametrize(
    "change",
    [
        {"metrics": {"loss": 10**400}},
        {"metrics": {"loss": "<b>"}},
        {"metrics": [1]},
        {"started": 10**400},
        {"error": {}},
        {"git": "main"},
        {"environment": []},
        {"notebook": {}},
        {"labels": {}},
        {"config": {"seed": 1}},
    ],
)
def test_a_forged_run_is_none(change: dict[str, Any]):
    run = json.loads(Run("20200101-000000-abcdef", "x", "cell", "y", 0.0).to_json())
    with pytest.raises(ValueError, match=r"not a run|of wrong types|a text for a number|labels in the record"):
        Run.from_json(json.dumps(run | change))


def test_pipes_and_devices_in_place_of_files_hold_nothing_up(registry: RunRegistry):
    recording = registry.begin("launch", "a.py", options())
    assert recording.folder is not None
    os.mkfifo(recording.folder / "metrics.jsonl")
    assert [run.metrics for run in registry.runs(sampled=True)] == [{}]
    (recording.folder / "run.json").unlink()
    (recording.folder / "run.json").symlink_to("/dev/zero")
    assert registry.runs() == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "required: COMMAND"),
        ("shwo", "invalid choice"),
        ("show", "required: RUN"),
        ("show nothing", "there is no run 'nothing'"),
        ("compare last last", "there is no run 'last'"),
        ("list --limit 0", "--limit 0 must be at least 1"),
        ("label", "required: RUN"),
        ("label last --tag a,b", "there is no run 'last'"),
    ],
)
def test_wrong_use_is_one_line(registry: RunRegistry, line: str, message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["runs", *line.split()]) == 2
    reported = capsys.readouterr().err
    assert message in reported
    assert len(reported.strip().splitlines()) == 1
