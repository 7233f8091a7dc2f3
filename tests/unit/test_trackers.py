"""Experiment trackers: what they are given, read back from the real files; and that none of them stops a training."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from accel_nb import Accelerator, GeneralTracker
from accel_nb.accelerator.tracking.tracked_run import SavedRun
from accel_nb.errors import ConfigError, MisuseError
from accel_nb.telemetry.trackers import TrackerThread, pictures
from accel_nb.telemetry.trackers.clearml import ClearmlTracker
from accel_nb.telemetry.trackers.mlflow import MlflowTracker
from accel_nb.telemetry.trackers.selection import build_trackers


class Recorder(GeneralTracker):
    """A tracker that records its calls."""

    name = "recorder"

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    @property
    def tracker(self) -> list[Any]:
        return self.calls

    def start(self) -> None:
        self.calls.append("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.calls.append(values)

    def log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        self.calls.append((step, values, kwargs))

    def finish(self) -> None:
        self.calls.append("finish")


class Broken(Recorder):
    """Fails at one of its calls."""

    def __init__(self, at: str) -> None:
        super().__init__()
        setattr(self, at, self.fail)

    name = "broken"

    def fail(self, *_args: Any, **_kwargs: Any) -> None:
        self.calls.append("failed")
        raise OSError("the server is down")


@pytest.fixture
def lines(tmp_path: Path) -> Callable[[], list[Any]]:
    return lambda: [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]


def test_jsonl_holds_configuration_and_values(tmp_path: Path, lines: Any) -> None:
    accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=tmp_path)
    accelerator.init_trackers("run", {"lr": 0.1, "api_key": "hunter2", "data": {"hf_token": "x", "path": "y"}})
    accelerator.log({"loss": torch.tensor(0.5), "note": "warm"}, step=3)
    accelerator.log({"loss": float("nan")}, step=4)
    accelerator.end_training()
    config, first, second = lines()
    assert config == {"config": {"lr": 0.1, "api_key": "***", "data": {"hf_token": "***", "path": "y"}}}
    assert (first["step"], first["values"]) == (3, {"loss": 0.5, "note": "warm"})
    assert second["values"] == {"loss": "nan"}


def test_a_run_of_the_same_name_goes_on_in_the_same_file(tmp_path: Path, lines: Any) -> None:
    for step in (1, 2):
        accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=tmp_path)
        accelerator.init_trackers("run")
        accelerator.log({"loss": 1.0}, step=step)
        accelerator.close()
    assert [line["step"] for line in lines()] == [1, 2]


def test_tensorboard_reads_back_what_was_logged(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with=["tensorboard"], project_dir=tmp_path)
    accelerator.init_trackers("digits", {"lr": 0.1, "widths": [1, 2]})
    for step in range(5):
        accelerator.log({"loss": 1 / (step + 1), "text": "hello"}, step=step)
    writer = accelerator.get_tracker("tensorboard", unwrap=True)
    writer.add_scalar("extra", 7.0, 0)
    accelerator.end_training()
    events = EventAccumulator(str(tmp_path / "digits"))
    events.Reload()
    assert [(item.step, item.value) for item in events.Scalars("loss")] == [
        (step, pytest.approx(1 / (step + 1))) for step in range(5)
    ]
    assert [item.value for item in events.Scalars("extra")] == [7.0]
    assert "text/text_summary" in events.Tags()["tensors"]


def test_own_tracker_is_started_called_and_finished_in_order() -> None:
    tracker = Recorder()
    accelerator = Accelerator(cpu=True, log_with=tracker)
    assert accelerator.log_with == ["recorder"]
    accelerator.init_trackers("run", {"seed": 1})
    accelerator.log({"loss": 2.0}, log_kwargs={"recorder": {"commit": True}, "other": {"x": 1}})
    assert accelerator.get_tracker("recorder") is tracker
    accelerator.end_training()
    accelerator.end_training()
    assert tracker.calls == ["start", {"seed": 1}, (0, {"loss": 2.0}, {"commit": True}), "finish"]
    assert accelerator.trackers == [accelerator.get_tracker("recorder")] == [tracker], "after the end too"


def test_a_slow_tracker_holds_nothing_up() -> None:
    may_go_on = threading.Event()

    class Slow(Recorder):
        def log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
            assert may_go_on.wait(30)
            super().log(values, step)

    tracker = Slow()
    feed = TrackerThread([tracker], None)
    for step in range(1000):
        feed.log({"loss": 1.0}, step, {})
    assert not any(isinstance(item, tuple) for item in tracker.calls)
    may_go_on.set()
    feed.close()
    assert [item[0] for item in tracker.calls[1:-1]] == list(range(1000))


@pytest.mark.parametrize("at", ["start", "store_init_configuration", "log", "finish", "flush"])
def test_a_tracker_that_fails_is_reported_once_and_the_others_go_on(at: str, caplog: pytest.LogCaptureFixture) -> None:
    broken, good = Broken(at), Recorder()
    with caplog.at_level(logging.WARNING, logger="accel_nb"):
        feed = TrackerThread([broken, good], {"a": 1})
        for step in range(5):
            feed.log({"loss": 1.0}, step, {})
        feed.close()
    assert broken.calls.count("failed") == 1
    assert len([record for record in caplog.records if "broken failed" in record.message]) == 1
    assert good.calls == ["start", {"a": 1}, *[(step, {"loss": 1.0}, {}) for step in range(5)], "finish"]


def test_a_tracker_that_hangs_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    may_end = threading.Event()

    class Hanging(Recorder):
        name = "hanging"

        def finish(self) -> None:
            may_end.wait(30)

    feed = TrackerThread([Hanging()], None)
    with caplog.at_level(logging.WARNING, logger="accel_nb"):
        feed.close(timeout_s=0.05)
    may_end.set()
    assert "their last values may be missing: hanging" in caplog.text


def test_a_run_cannot_leave_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=folder)
    accelerator.init_trackers("../../etc/passwd")
    accelerator.end_training()
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    assert [path.name for path in folder.iterdir()] == ["_.._etc_passwd.jsonl"]


def test_bad_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'tensorbord' is not a tracker; did you mean tensorboard"):
        Accelerator(cpu=True, log_with="tensorbord")
    with pytest.raises(ConfigError, match="comet_ml needs a package that is not installed: pip install comet_ml"):
        Accelerator(cpu=True, log_with=["jsonl", "comet_ml"])
    without_folder = Accelerator(cpu=True, log_with="jsonl")
    with pytest.raises(MisuseError, match=r"give Accelerator\(project_dir="):
        without_folder.init_trackers("run")
    with pytest.raises(MisuseError, match="init_trackers has not been called"):
        without_folder.get_tracker("jsonl")
    with pytest.raises(MisuseError, match="log_with has jsonl"):
        without_folder.get_tracker("tensorboard")
    accelerator = Accelerator(cpu=True, log_with="all", project_dir=tmp_path)
    assert accelerator.log_with == ["jsonl", "tensorboard"]
    with pytest.raises(MisuseError, match="init_kwargs names wandb"):
        accelerator.init_trackers("run", init_kwargs={"wandb": {}})
    with pytest.raises(MisuseError, match="log\\('x'\\) got a list"):
        accelerator.log({"x": [1]})


class Known(Recorder):
    """Has a run that it can go on with."""

    name = "known"
    run_id = "first"

    def resume(self, run_id: str, step: int) -> None:
        self.calls.append(("resume", run_id, step))
        self.run_id = run_id


def _trained(folder: Path, *trackers: Any, project: str = "digits") -> Accelerator:
    accelerator = Accelerator(cpu=True, log_with=["jsonl", "tensorboard", *trackers], project_dir=folder)
    model = torch.nn.Linear(1, 1)
    accelerator.model, accelerator.optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.init_trackers(project)
    return accelerator


def _step(accelerator: Accelerator) -> None:
    accelerator.backward(accelerator.model(torch.ones(1, 1)).sum())
    accelerator.optimizer.step()
    accelerator.optimizer.zero_grad()
    accelerator.log({"loss": 1.0})


def test_a_resumed_training_goes_on_with_the_same_run(tmp_path: Path) -> None:
    first = _trained(tmp_path, Known())
    for _ in range(2):
        _step(first)
    first.save_state(tmp_path / "kept")
    _step(first)  # lost: it comes after the checkpoint
    first.close()

    tracker = Known()
    tracker.run_id = "second"
    second = _trained(tmp_path, tracker)
    second.load_state(tmp_path / "kept")
    _step(second)
    second.save_state(tmp_path / "again")
    second.close()
    assert tracker.calls[:2] == [("resume", "first", 2), "start"]
    lines = [json.loads(line) for line in (tmp_path / "digits.jsonl").read_text().splitlines()]
    assert [line.get("step", line) for line in lines] == [1, 2, 3, {"resumed": {"step": 2}}, 3]
    events = EventAccumulator(str(tmp_path / "digits"))
    events.Reload()
    assert [item.step for item in events.Scalars("loss")] == [1, 2, 3]

    late = Known()
    third = Accelerator(cpu=True, log_with=late)
    model = torch.nn.Linear(1, 1)
    third.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    third.load_state(tmp_path / "again")
    third.init_trackers("digits")
    third.end_training()
    assert late.calls[:2] == [("resume", "first", 3), "start"]
    third.init_trackers("digits")  # another run of the same name, not the one that has ended
    third.end_training()
    assert late.calls[3:] == ["start", "finish"]


def test_a_run_of_another_name_and_one_that_is_open_are_not_taken_over(tmp_path: Path) -> None:
    first = _trained(tmp_path, Known())
    _step(first)
    first.save_state(tmp_path / "kept")
    first.close()

    other = _trained(tmp_path, tracker := Known(), project="other")
    report = other.load_state(tmp_path / "kept")
    other.close()
    assert "trackers begin the run 'other': the checkpoint is of 'digits'" in report.notes
    assert tracker.calls == ["start", "finish"]

    open_one = Known()
    open_one.run_id = "mine"
    third = _trained(tmp_path, open_one)
    third.log({"loss": 0.0})
    report = third.load_state(tmp_path / "kept")
    third.close()
    assert any("known continues the open run" in note for note in report.notes)
    assert not any(item[0] == "resume" for item in open_one.calls if isinstance(item, tuple))


def test_an_id_out_of_a_checkpoint_is_checked() -> None:
    saved = {"project": "digits", "run_ids": {"a": "ok", "b": "x" * 300, "c": 7, "d": "line\nline", "e": ""}}
    run = SavedRun.from_json(saved, 5)
    assert run == SavedRun("digits", {"a": "ok"}, 5)
    assert SavedRun.from_json(["digits"], 5) is None
    assert SavedRun.from_json({"project": "digits", "run_ids": ["a"]}, 5) == SavedRun("digits", {}, 5)


def test_pictures_come_out_in_one_form() -> None:
    float_tensor = torch.tensor([[[0.0, 1.0]], [[0.5, 2.0]], [[-1.0, float("nan")]]])  # 3 channels, 1 x 2
    [picture] = pictures(float_tensor)
    assert picture.dtype == np.uint8
    assert picture.tolist() == [[[0, 127, 0], [255, 255, 0]]]
    assert [item.shape for item in pictures(np.zeros((5, 3, 8, 9)))] == [(8, 9, 3)] * 5
    assert [item.shape for item in pictures([np.zeros((4, 6)), torch.zeros(1, 4, 6)])] == [(4, 6, 1)] * 2
    assert pictures(np.array([[True, False]]))[0].ravel().tolist() == [255, 0]
    source = np.zeros((2, 2, 3), np.uint8)
    [copy] = pictures(source)
    source[:] = 9
    assert not copy.any()
    for wrong in ("cat.png", np.zeros(5), np.zeros((2, 5, 5)), {"a": 1}):
        with pytest.raises(MisuseError, match="log_images got"):
            pictures(wrong)


def test_images_tables_and_artifacts_go_to_trackers_that_keep_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Keeping(Recorder):
        name = "keeping"

        def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
            self.calls.append((step, {name: [item.shape for item in value] for name, value in values.items()}, kwargs))

        def log_artifact(self, local_path: str, name: str | None = None) -> None:
            self.calls.append((local_path, name))

    tracker = Keeping()
    accelerator = Accelerator(cpu=True, log_with=["tensorboard", tracker], project_dir=tmp_path)
    accelerator.init_trackers("run")
    with caplog.at_level(logging.WARNING, logger="accel_nb"):
        for _ in range(2):
            accelerator.log_table("scores", ["name", "score"], [["a|b", 1.0]])
        accelerator.log_images({"digit": torch.zeros(2, 1, 8, 8)}, step=4, log_kwargs={"keeping": {"caption": "c"}})
        accelerator.log_artifact(tmp_path, name="all")
        accelerator.end_training()
    assert tracker.calls[1:-1] == [(4, {"digit": [(8, 8, 1)] * 2}, {"caption": "c"}), (str(tmp_path), "all")]
    assert [record.message for record in caplog.records] == [
        "tracker keeping does not support tables; they are not logged there",
        "tracker tensorboard does not support artifacts; they are not logged there",
    ]
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    assert [(image.step, image.width, image.height) for image in events.Images("digit")] == [(4, 16, 8)]
    text = events.Tensors("scores/text_summary")[0].tensor_proto.string_val[0].decode()
    assert text.splitlines()[2] == "| a\\|b | 1.0 |"
    accelerator.init_trackers("run")
    board: Any = accelerator.trackers[0]
    assert board.writer is board.tracker is not None
    with pytest.raises(MisuseError, match="there is no"):
        accelerator.log_artifact(tmp_path / "missing")
    accelerator.end_training()


class MlflowServer:
    """Stands in for MLflow's client: it refuses what a server refuses, and is down once when a test asks for it."""

    def __init__(self, _uri: str | None = None) -> None:
        self.received: list[tuple[str, Any]] = []
        self.num_requests, self.fails_at = 0, 0

    def get_experiment_by_name(self, _name: str) -> Any:
        return SimpleNamespace(experiment_id="1")

    def search_runs(self, *_args: Any, **_kwargs: Any) -> list[Any]:
        return []

    def get_run(self, run_id: str) -> Any:
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id))

    def update_run(self, run_id: str, status: str) -> None:
        self.received.append((run_id, status))

    def create_run(self, *args: Any, **options: Any) -> Any:
        self.created = (*args, options)
        return SimpleNamespace(info=SimpleNamespace(run_id="r"))

    def log_metric(self, *values: Any, **options: Any) -> None:
        self.received.append((values[1], options))

    def log_artifacts(self, *values: Any) -> None:
        self.received.append(("artifacts", values))

    def set_tag(self, _run: str, key: str, value: str) -> None:
        self.receive(key, value)

    def log_batch(self, _run: str, metrics: Any) -> None:
        self.num_requests += 1
        if self.num_requests == self.fails_at:
            raise OSError("the server is down")
        for metric in metrics:
            self.receive(metric.key, metric.value)

    def receive(self, key: str, value: Any) -> None:
        assert re.fullmatch(r"[/\w.\- ]+", key), key
        assert not isinstance(value, bool)
        self.received.append((key, value))


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> tuple[MlflowTracker, MlflowServer]:
    def metric(key: str, value: float, timestamp: int, step: int) -> Any:
        return SimpleNamespace(key=key, value=value, timestamp=timestamp, step=step)

    server = MlflowServer()
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=lambda _uri: server))
    monkeypatch.setitem(sys.modules, "mlflow.entities", SimpleNamespace(Metric=metric))
    tracker = MlflowTracker("run")
    tracker.start()
    return tracker, server


def test_mlflow_gets_names_and_values_that_it_allows(mlflow: tuple[MlflowTracker, MlflowServer]) -> None:
    tracker, server = mlflow
    tracker.log({"acc@1": 0.5, "mAP50(B)": 0.25, "is best": True, "note!": "x" * 6000, "val": {"a-b.c": 1}}, 1)
    tracker.flush()
    assert sorted(server.received) == [
        ("acc_1", 0.5), ("is best", 1), ("mAP50_B_", 0.25), ("note_", "x" * 5000), ("val/a-b.c", 1),
    ]  # fmt: skip


def test_mlflow_takes_the_arguments_of_accelerate(
    mlflow: tuple[MlflowTracker, MlflowServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, server = mlflow
    monkeypatch.setattr(server, "get_experiment_by_name", lambda name: SimpleNamespace(experiment_id=name))
    options = {"run_name": "first", "tags": '{"a": "b"}', "description": "text"}
    (tracker,) = build_trackers(("mlflow",), "digits", None, {"mlflow": options})
    tracker.start()
    experiment, made = server.created
    assert (experiment, made["run_name"]) == ("digits", "first")
    assert made["tags"] == {"a": "b", "mlflow.note.content": "text", "accel_nb.run": tracker.run_id}
    tracker.log({"loss": 1.0}, model_id="m")
    MlflowTracker.log_artifacts(tracker, "folder", "there")  # pyright: ignore[reportArgumentType]
    assert server.received == [("loss", {"step": 0, "model_id": "m"}), ("artifacts", ("r", "folder", "there"))]

    monkeypatch.setenv("MLFLOW_RUN_ID", "known")
    continued = MlflowTracker("digits")
    continued.start()
    assert continued.tracker.info.run_id == "known"
    assert ("known", "RUNNING") in server.received


class ClearmlTask:
    """Stands in for ``clearml.Task``, and for its logger."""

    def __init__(self) -> None:
        self.id = "t"
        self.received: list[Any] = []

    def current_task(self) -> ClearmlTask:
        return self

    def get_logger(self) -> ClearmlTask:
        return self

    def report_scalar(self, *values: Any) -> None:
        self.received.append(values)

    def report_single_value(self, *values: Any) -> None:
        self.received.append(values)

    def report_table(self, *values: Any, table_plot: Any, iteration: int) -> None:
        self.received.append((*values, iteration, table_plot))

    def close(self) -> None:
        raise AssertionError("the program's own task stays open")


def test_clearml_logs_to_the_task_that_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    task = ClearmlTask()
    monkeypatch.setitem(sys.modules, "clearml", SimpleNamespace(Task=task))
    tracker = ClearmlTracker()
    tracker.start()
    tracker.log({"train_loss": 1.0, "lr": 0.1, "both": {"a": 1.0}}, 2)
    tracker.log({"best": 0.5})
    tracker.log_table("rows", data=[["a", "b"], [1, 2]])
    tracker.log_table("frame", dataframe="a data frame", step=3)
    tracker.finish()
    assert task.received == [
        ("loss", "train", 1.0, 2), ("lr", "train", 0.1, 2), ("both", "a", 1.0, 2), ("best", 0.5),
        ("rows", "train", 0, [["a", "b"], [1, 2]]), ("frame", "train", 3, "a data frame"),
    ]  # fmt: skip


def test_dvclive_needs_no_folder(tmp_path: Path) -> None:
    folders = [
        vars(build_trackers(("dvclive",), "digits", folder, options)[0])["folder"]
        for folder, options in ((None, {}), (tmp_path, {}), (tmp_path, {"dvclive": {"dir": "own"}}))
    ]
    assert folders == [Path("dvclive"), tmp_path / "digits", Path("own")]


def test_mlflow_keeps_what_was_not_sent(mlflow: tuple[MlflowTracker, MlflowServer]) -> None:
    tracker, server = mlflow
    server.fails_at = 2
    with pytest.raises(OSError, match="down"):
        tracker.log({f"m{index}": index for index in range(1500)}, 1)
    assert len(server.received) == 1000
    tracker.flush()
    assert server.received == [(f"m{index}", index) for index in range(1500)]


PACKAGE = """
from pathlib import Path
from accel_nb import GeneralTracker

class Mine(GeneralTracker):
    name = "mine"
    requires_logging_directory = True

    def __init__(self, run_name, logging_dir, suffix=".txt"):
        super().__init__()
        self.path = Path(logging_dir) / (run_name + suffix)

    def log(self, values, step, **kwargs):
        self.path.write_text(f"{step} {values}")

class Misnamed(Mine):
    name = "other"
"""

USE_PACKAGE = """
import json
from accel_nb import Accelerator
from accel_nb.errors import ConfigError, MisuseError

problems = []
for name in ("misnamed", "absent"):
    try:
        Accelerator(cpu=True, log_with=name, project_dir=".").init_trackers("run")
    except MisuseError as error:
        problems.append(str(error))
try:
    Accelerator(cpu=True, log_with="mime")
except ConfigError as error:
    problems += error.problems
accelerator = Accelerator(cpu=True, log_with=["jsonl", "mine"], project_dir=".")
accelerator.init_trackers("run", init_kwargs={"mine": {"suffix": ".log"}})
accelerator.log({"loss": 0.5}, step=3)
kind = type(accelerator.get_tracker("mine")).__module__
accelerator.end_training()
print(json.dumps([problems, kind]))
"""


def test_a_tracker_of_another_package_is_selected_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "my_tracker.py").write_text(PACKAGE)
    installed = tmp_path / "my_tracker-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: my_tracker\nVersion: 1.0\n")
    points = {"mine": "my_tracker:Mine", "misnamed": "my_tracker:Misnamed", "absent": "no_such_module:A"}
    points["jsonl"] = "no_such_module:A"  # a built-in tracker keeps its name
    lines = [f"{name} = {value}\n" for name, value in points.items()]
    (installed / "entry_points.txt").write_text("[accel_nb.trackers]\n" + "".join(lines))
    paths = os.pathsep.join([str(tmp_path), os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", USE_PACKAGE],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (misnamed, absent, unknown), kind = json.loads(done.stdout)
    assert "misnamed (my_tracker:Misnamed) must be a tracker class with name = 'misnamed'" in misnamed
    assert "absent (no_such_module:A) cannot be imported: ModuleNotFoundError" in absent
    assert "did you mean mine?" in unknown
    assert kind == "my_tracker"
    assert (tmp_path / "run.log").read_text() == "3 {'loss': 0.5}"
    assert (tmp_path / "run.jsonl").is_file()


def test_tensorboard_keeps_pictures_of_several_sizes(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("run")
    accelerator.log_images({"none": [], "crop": [np.zeros((4, 6, 3)), np.zeros((8, 5, 1))]}, step=1)
    accelerator.log({"loss": 0.5}, step=1)
    accelerator.end_training()
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    assert sorted(events.Tags()["images"]) == ["crop/0", "crop/1"]
    assert [(image.width, image.height) for image in events.Images("crop/1")] == [(5, 8)]
    assert [item.value for item in events.Scalars("loss")] == [0.5]
