"""Values and trackers of unusual kinds: nothing changes on the way, and no tracker takes the others with it."""

from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from accel_nb import GeneralTracker
from accel_nb.telemetry.trackers import TrackerThread, pictures
from accel_nb.telemetry.trackers.base import json_value
from accel_nb.telemetry.trackers.dvclive import DvcliveTracker
from accel_nb.telemetry.trackers.selection import build_trackers, parse_log_with
from accel_nb.telemetry.trackers.wandb import WandbTracker


class Recorder(GeneralTracker):
    """A tracker that records values."""

    name = "recorder"

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Any] = []

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.values.append((step, values))


def test_a_library_that_exits_ends_its_tracker_only(caplog: pytest.LogCaptureFixture) -> None:
    class Exiting(GeneralTracker):
        name = "exiting"

        def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
            raise SystemExit(1)

    recorder = Recorder()
    with caplog.at_level(logging.WARNING, logger="accel_nb"):
        feed = TrackerThread([Exiting(), recorder], None)
        for step in (1, 2):
            feed.log({"loss": 1.0}, step, {})
        feed.close()
    assert recorder.values == [(1, {"loss": 1.0}), (2, {"loss": 1.0})]
    assert "tracker exiting failed" in caplog.text


def test_a_tracker_of_an_earlier_accelerate_has_no_start() -> None:
    class Earlier:
        name = "earlier"
        requires_logging_directory = False

        def __init__(self) -> None:
            self.calls: list[Any] = []

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            self.calls.append(values)

        def log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
            self.calls.append((step, values))

        def finish(self) -> None:
            self.calls.append("finish")

    tracker: Any = Earlier()
    feed = TrackerThread([tracker], {"lr": 1.0})
    feed.log({"loss": 1.0}, 1, {})
    feed.close()
    assert tracker.calls == [{"lr": 1.0}, (1, {"loss": 1.0}), "finish"]


def test_values_are_those_of_the_call() -> None:
    recorder, losses = Recorder(), {"sum": torch.tensor(1.0), "best": np.float32(0.5)}
    feed = TrackerThread([recorder], None)
    feed.log({"losses": losses}, 1, {})
    losses["sum"] += 1
    losses["best"] = np.float32(0)
    feed.close()
    assert recorder.values == [(1, {"losses": {"sum": 1.0, "best": 0.5}})]


def test_numbers_of_a_configuration_stay_numbers() -> None:
    values = {
        "width": np.int64(3),
        "rates": (np.float32(0.5), torch.tensor(2)),
        "shape": np.zeros(2),
        "name": Path("a"),
    }
    assert json_value(values) == {"width": 3, "rates": [0.5, 2], "shape": "[0. 0.]", "name": "a"}


def test_pictures_have_the_colors_of_the_image() -> None:
    palette = Image.new("P", (1, 1), 1)
    palette.putpalette([0, 0, 0, 255, 128, 0])
    assert pictures(palette)[0].tolist() == [[[255, 128, 0]]]
    palette.info["transparency"] = 1
    assert pictures(palette)[0].tolist() == [[[255, 128, 0, 0]]]
    assert pictures(Image.new("CMYK", (1, 1), (0, 0, 0, 0)))[0].tolist() == [[[255, 255, 255]]]
    assert pictures(Image.new("LA", (1, 1), (7, 0)))[0].tolist() == [[[7, 7, 7, 0]]]
    assert pictures(Image.new("L", (1, 1), 7))[0].tolist() == [[[7]]]
    assert pictures(torch.ones(3, 1, 1, dtype=torch.bfloat16))[0].tolist() == [[[255, 255, 255]]]


@dataclass
class Configured(GeneralTracker):
    """A tracker without a hash, and equal to others."""

    project: str = "a"
    name = "configured"


def test_trackers_are_chosen_by_identity() -> None:
    first, second = Configured(), Configured()
    chosen = parse_log_with(["jsonl", first, second, first, "jsonl"])
    assert [item if isinstance(item, str) else id(item) for item in chosen] == ["jsonl", id(first), id(second)]


def test_a_folder_is_that_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    feed = TrackerThread(build_trackers(("jsonl",), "run", "logs", {}), None)
    (tmp_path / "elsewhere").mkdir()
    os.chdir("elsewhere")
    feed.log({"loss": 1.0}, 1, {})
    feed.close()
    assert (tmp_path / "logs" / "run.jsonl").exists()
    (aim,) = build_trackers(("aim",), "run", "aim://host:53800", {})
    assert vars(aim)["_options"]["repo"] == "aim://host:53800"


def test_steps_that_wandb_drops_are_reported(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    logged: list[Any] = []
    run = SimpleNamespace(step=5, log=lambda values, step: logged.append((values, step)), finish=lambda: None)
    package = SimpleNamespace(Settings=lambda **_: None, init=lambda **_: run)
    monkeypatch.setitem(sys.modules, "wandb", package)
    with caplog.at_level(logging.WARNING, logger="accel_nb"):
        feed = TrackerThread([WandbTracker("project")], None)
        for step in (3, 4, 5, None):
            feed.log({"loss": 1.0}, step, {})
        feed.close()
    assert logged == [({"loss": 1.0}, 5), ({"loss": 1.0}, None)]
    assert len(caplog.records) == 1
    assert "tracker wandb does not support values of steps before the latest" in caplog.text


@pytest.mark.parametrize(
    ("has_folder", "is_resumed", "continues"), [(True, False, True), (False, False, False), (False, True, True)]
)
def test_dvclive_continues_a_run_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_folder: bool, is_resumed: bool, continues: bool
) -> None:
    opened: list[Any] = []
    monkeypatch.setitem(sys.modules, "dvclive", SimpleNamespace(Live=lambda **options: opened.append(options)))
    monkeypatch.chdir(tmp_path)
    tracker = DvcliveTracker("second", tmp_path if has_folder else None)
    tracker.folder.mkdir()
    (tracker.folder / "metrics.json").write_text("{}")
    if is_resumed:
        tracker.resume("second", 3)
    tracker.start()
    assert opened[0]["resume"] is continues


def test_a_line_that_was_cut_does_not_take_the_next_one_with_it(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").write_text('{"step": 1}\n{"ste')
    feed = TrackerThread(build_trackers(("jsonl",), "run", tmp_path, {}), None)
    feed.log({"loss": 1.0}, 2, {})
    feed.close()
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    assert (len(lines), json.loads(lines[-1])["values"]) == (3, {"loss": 1.0})
