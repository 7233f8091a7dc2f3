from __future__ import annotations

import logging
from typing import Any

import pytest

from accel_nb.telemetry.events import MemorySample, StepDone
from accel_nb.ui.fallback import DisplayFacts, choose_rung
from accel_nb.ui.panel import Panel
from tests.ui.synthetic import training_events

EVERYTHING = DisplayFacts("jupyter", True, frozenset({"anywidget", "ipywidgets", "matplotlib"}), True)


@pytest.mark.parametrize(
    ("change", "mode", "rung"),
    [
        ({}, "live", "widget"),
        ({}, "static", "picture"),
        ({"platform": "vscode"}, "live", "widget"),
        ({"platform": "colab"}, "live", "widget"),
        ({"platform": "kaggle"}, "live", "core widget"),
        ({"platform": "kaggle"}, "static", "picture"),
        ({"platform": "deepnote"}, "live", "picture"),
        ({"importable": frozenset({"matplotlib"})}, "live", "picture"),
        ({"importable": frozenset({"anywidget"})}, "static", "text"),
        ({"importable": frozenset()}, "live", "text"),
        ({"importable": frozenset({"ipywidgets", "matplotlib"})}, "live", "core widget"),
        ({"platform": "deepnote", "importable": frozenset({"ipywidgets", "matplotlib"})}, "live", "picture"),
        ({"importable": frozenset({"ipywidgets"})}, "live", "text"),
        ({"has_bundle": False}, "live", "core widget"),
        ({"has_kernel": False}, "live", "text"),
    ],
)
def test_rung_follows_the_facts(change: dict[str, Any], mode: Any, rung: str):
    values = {name: getattr(EVERYTHING, name) for name in DisplayFacts.__slots__} | change
    assert choose_rung(DisplayFacts(**values), mode) == rung


class FakeDisplay:
    """Takes what the panel shows, in place of IPython's display."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shown: list[dict[str, Any]] = []
        monkeypatch.setattr("IPython.display.display", self)

    def __call__(self, bundle: dict[str, Any], *, raw: bool, display_id: bool = False) -> FakeDisplay:
        assert raw
        self.shown.append(bundle)
        return self

    def update(self, bundle: dict[str, Any], *, raw: bool) -> None:
        assert raw
        self.shown.append(bundle)


@pytest.fixture
def display(monkeypatch: pytest.MonkeyPatch) -> FakeDisplay:
    return FakeDisplay(monkeypatch)


def test_a_cell_that_trains_nothing_shows_nothing(display: FakeDisplay):
    panel = Panel("run", 1, rung="picture")
    panel.feed([MemorySample(0, 0, 1.0, 1, 1, 1, 1, 1, 1)])
    panel.refresh(force=True)
    panel.finish("done")
    assert not display.shown
    assert not panel.is_shown


def test_a_panel_that_is_off_keeps_nothing(display: FakeDisplay):
    panel = Panel("run", 2, mode="off")
    panel.feed(training_events(10))
    panel.refresh()
    panel.finish("done")
    assert not display.shown
    assert not panel.state.tables


def test_a_picture_is_shown_once_and_drawn_again_at_the_end(display: FakeDisplay):
    panel = Panel("run", 2, rung="picture")
    for event in training_events(40):
        panel.feed([event])
        panel.refresh()
    panel.finish("done")
    assert len(display.shown) == 2, "a picture is expensive: one at the start, one at the end of a short run"
    assert set(display.shown[-1]) == {"image/png", "text/plain"}
    assert display.shown[-1]["text/plain"].startswith("40 steps, loss")


def test_text_is_one_line_at_the_end(display: FakeDisplay):
    panel = Panel("run", 2, rung="text")
    panel.feed(training_events(40))
    panel.refresh(force=True)
    panel.finish("interrupted")
    assert [list(bundle) for bundle in display.shown] == [["text/plain"]]
    assert display.shown[0]["text/plain"].endswith(", interrupted")


def test_a_short_cell_is_shown_when_it_finishes(display: FakeDisplay):
    panel = Panel("run", 1, rung="text")
    panel.feed([StepDone(0, 1, 1.0, 0.5, 0.1, 0.01, 8)])
    panel.finish("done")
    panel.finish("done")
    assert len(display.shown) == 1


def test_a_panel_that_fails_is_given_up_with_one_warning(
    display: FakeDisplay, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def broken(_: object) -> bytes:
        raise OSError("no fonts")

    monkeypatch.setattr("accel_nb.ui.picture.draw_png", broken)
    panel = Panel("run", 2, rung="picture")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            panel.feed(training_events(5))
            panel.refresh(force=True)
        panel.finish("done")
    assert [record.message for record in caplog.records] == [
        "the panel failed and is not drawn any more; the run goes on"
    ]


class Browser:
    """Counts the rows that each widget was sent, as a page adds them up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.widgets: list[Any] = []
        self.rows: list[dict[tuple[str, int, str], int]] = []
        self.said = ""
        browser = self

        def send(widget: Any, message: dict[str, Any], buffers: Any) -> None:
            if widget not in browser.widgets:
                browser.widgets.append(widget)
                browser.rows.append({})
            rows = browser.rows[browser.widgets.index(widget)]
            if message["kind"] == "snapshot":
                rows.clear()
            for block in message["blocks"]:
                key = block["table"], block["rank"], block["name"]
                rows[key] = rows.get(key, 0) + block["rows"]
            browser.said = message["facts"]["said"]

        monkeypatch.setattr("accel_nb.ui.widget.PanelWidget.send", send)


def test_a_panel_that_is_attached_to_has_everything_once_and_goes_on_in_both_places(
    display: FakeDisplay, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("accel_nb.ui.panel.BYTES_PER_S", 1 << 30)  # else it is sent the extremes: see the next test
    browser = Browser(monkeypatch)
    asked: list[object] = []
    panel = Panel("run", 2, rung="widget", on_control=asked.append)
    events = list(training_events(300))
    panel.attach()
    assert not panel.is_shown, "there is nothing to draw yet"
    for index, event in enumerate(events):
        panel.feed([event])
        if index in (100, 400, 700):
            panel.refresh(force=True)
        if index == 500:
            panel.attach()
    panel.say("learning rate 0.1 -> 0.05")
    panel.refresh(force=True)
    expected = {key: table.total for key, table in panel.state.tables.items() if table.total}
    assert browser.rows == [expected, expected]
    assert browser.said == "learning rate 0.1 -> 0.05"
    second: Any = panel._surfaces[1]
    for message in (
        {"kind": "control", "action": {"kind": "stop"}},
        {"kind": "control"},
        {"kind": "x"},
        None,
        "control",
    ):
        second._on_message(None, message, [])
    assert asked == [{"kind": "stop"}, None]
    panel.finish("done")
    panel.attach()
    assert [bundle.keys() >= {"image/png"} for bundle in display.shown[-4:]] == [True, True, False, True]


def test_a_fast_run_is_sent_as_its_extremes_and_a_part_of_it_as_it_is(
    display: FakeDisplay, monkeypatch: pytest.MonkeyPatch
):
    sent: list[tuple[dict[str, Any], int]] = []
    monkeypatch.setattr(
        "accel_nb.ui.widget.PanelWidget.send", lambda _, message, buffers: sent.append((message, len(buffers[0])))
    )
    panel = Panel("run", 2, rung="widget")
    events = list(training_events(5000))
    panel.feed(events[:8])
    panel.refresh()
    panel.feed(events[8:])
    panel.refresh(force=True)
    assert sum(size for _, size in sent) < 5000 * 3 * 6 * 8 / 4, "a share of all the rows"
    surface: Any = panel._surfaces[0]
    for wrong in (
        {"first": "1"},
        {"table": "memory"},
        {"last": float("nan")},
        {"last": 10**400},
        {"name": 1},
        {"first": True},
    ):
        question = {"kind": "detail", "table": "step", "name": "", "first": 1000, "last": 1009}
        surface._on_message(None, question | wrong, [])
    panel.finish("done")
    before = len(sent)
    surface._on_message(None, {"kind": "detail", "table": "step", "name": "", "first": 1000, "last": 1009}, [])
    ((answer, size),) = sent[before:]
    assert answer["kind"] == "detail"
    assert {(block["rank"], block["rows"]) for block in answer["blocks"]} == {(0, 10), (1, 10), (-1, 10)}
    assert size == 30 * 6 * 8


def test_what_was_said_is_sent_although_nothing_else_is_new(display: FakeDisplay, monkeypatch: pytest.MonkeyPatch):
    browser = Browser(monkeypatch)
    panel = Panel("run", 2, rung="widget")
    panel.feed(training_events(5))
    panel.refresh(force=True)
    panel.say("stopping after this step ...")
    surface: Any = panel._surfaces[0]
    surface._next_at = 0.0
    panel.refresh()
    assert browser.said == "stopping after this step ..."
