"""Experiment trackers: what they are given, read back from the real files; and that none of them stops a training."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from accel_nb import Accelerator, GeneralTracker
from accel_nb.errors import ConfigError, MisuseError
from accel_nb.telemetry.trackers import TrackerFeed


class Recorder(GeneralTracker):
    """Keeps what it is told."""

    name = "recorder"

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []

    @property
    def tracker(self) -> list[Any]:
        return self.told

    def start(self) -> None:
        self.told.append("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.told.append(values)

    def log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        self.told.append((step, values, kwargs))

    def finish(self) -> None:
        self.told.append("finish")


class Broken(Recorder):
    """Fails at one of its calls."""

    def __init__(self, at: str) -> None:
        super().__init__()
        setattr(self, at, self.fail)

    name = "broken"

    def fail(self, *_args: Any, **_kwargs: Any) -> None:
        self.told.append("failed")
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


def test_own_tracker_is_started_told_and_finished_in_order() -> None:
    tracker = Recorder()
    accelerator = Accelerator(cpu=True, log_with=tracker)
    assert accelerator.log_with == ["recorder"]
    accelerator.init_trackers("run", {"seed": 1})
    accelerator.log({"loss": 2.0}, log_kwargs={"recorder": {"commit": True}, "other": {"x": 1}})
    assert accelerator.get_tracker("recorder") is tracker
    accelerator.end_training()
    accelerator.end_training()
    assert tracker.told == ["start", {"seed": 1}, (0, {"loss": 2.0}, {"commit": True}), "finish"]


def test_a_slow_tracker_holds_nothing_up() -> None:
    may_go_on = threading.Event()

    class Slow(Recorder):
        def log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
            assert may_go_on.wait(30)
            super().log(values, step)

    tracker = Slow()
    feed = TrackerFeed([tracker], None)
    for step in range(1000):
        feed.log({"loss": 1.0}, step, {})
    assert not any(isinstance(item, tuple) for item in tracker.told)
    may_go_on.set()
    feed.close()
    assert [item[0] for item in tracker.told[1:-1]] == list(range(1000))


@pytest.mark.parametrize("at", ["start", "store_init_configuration", "log", "finish", "flush"])
def test_a_tracker_that_fails_is_reported_once_and_the_others_go_on(at: str, caplog: pytest.LogCaptureFixture) -> None:
    broken, good = Broken(at), Recorder()
    with caplog.at_level(logging.WARNING, logger="accel_nb"):
        feed = TrackerFeed([broken, good], {"a": 1})
        for step in range(5):
            feed.log({"loss": 1.0}, step, {})
        feed.close()
    assert broken.told.count("failed") == 1
    assert len([record for record in caplog.records if "broken failed" in record.message]) == 1
    assert good.told == ["start", {"a": 1}, *[(step, {"loss": 1.0}, {}) for step in range(5)], "finish"]


def test_a_tracker_that_hangs_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    may_end = threading.Event()

    class Hanging(Recorder):
        name = "hanging"

        def finish(self) -> None:
            may_end.wait(30)

    feed = TrackerFeed([Hanging()], None)
    with caplog.at_level(logging.WARNING, logger="accel_nb"):
        feed.close(timeout_s=0.05)
    may_end.set()
    assert "left behind: hanging" in caplog.text


def test_a_run_cannot_leave_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=folder)
    accelerator.init_trackers("../../etc/passwd")
    accelerator.end_training()
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    assert [path.name for path in folder.iterdir()] == ["_.._etc_passwd.jsonl"]


def test_bad_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'tensorbord' is no tracker; did you mean tensorboard"):
        Accelerator(cpu=True, log_with="tensorbord")
    with pytest.raises(ConfigError, match="wandb is not served by this version"):
        Accelerator(cpu=True, log_with=["jsonl", "wandb"])
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
