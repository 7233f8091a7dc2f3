from __future__ import annotations

import gc
import logging
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel_nb.telemetry.events import MemorySample, StepDone
from accel_nb.ui.fallback import DisplayFacts, choose_display
from accel_nb.ui.panel import MAX_QUERIES, Panel
from accel_nb.ui.run_comparison import MAX_KEPT_RUNS, EarlierRuns
from accel_nb.ui.view import PanelState
from tests.ui.synthetic import training_events

EVERYTHING = DisplayFacts("jupyter", True, frozenset({"anywidget", "ipywidgets", "matplotlib"}), True)


@pytest.mark.parametrize(
    ("change", "mode", "display_mode"),
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
def test_display_mode_follows_the_facts(change: dict[str, Any], mode: Any, display_mode: str):
    values = {name: getattr(EVERYTHING, name) for name in DisplayFacts.__slots__} | change
    assert choose_display(DisplayFacts(**values), mode) == display_mode


class FakeDisplay:
    """Takes what the panel shows, in place of IPython's display."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shown: list[dict[str, Any]] = []
        monkeypatch.setattr("IPython.display.display", self)

    def __call__(
        self, bundle: dict[str, Any], *, raw: bool, display_id: bool = False, metadata: object = None
    ) -> FakeDisplay:
        assert raw
        self.shown.append(bundle)
        return self

    def update(self, bundle: dict[str, Any], *, raw: bool, metadata: object = None) -> None:
        assert raw
        self.shown.append(bundle)


@pytest.fixture
def display(monkeypatch: pytest.MonkeyPatch) -> FakeDisplay:
    return FakeDisplay(monkeypatch)


def test_a_cell_that_trains_nothing_shows_nothing(display: FakeDisplay):
    panel = Panel("run", 1, display="picture")
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
    panel = Panel("run", 2, display="picture")
    for event in training_events(40):
        panel.feed([event])
        panel.refresh()
    panel.finish("done")
    assert len(display.shown) == 2, "a picture is expensive: one at the start, one at the end of a short run"
    assert set(display.shown[-1]) == {"image/png", "text/plain"}
    assert display.shown[-1]["text/plain"].startswith("40 steps, loss")


def test_text_is_one_line_at_the_end(display: FakeDisplay, capsys: pytest.CaptureFixture[str]):
    panel = Panel("run", 2, display="text")
    panel.feed(training_events(40))
    panel.refresh(force=True)
    panel.finish("interrupted")
    assert capsys.readouterr().out == panel.state.summary() + "\n"
    assert panel.state.summary().endswith(", interrupted")
    assert display.shown == []


def test_a_short_cell_is_shown_when_it_finishes(display: FakeDisplay):
    panel = Panel("run", 1, display="picture")
    panel.feed([StepDone(0, 1, 1.0, 0.5, 0.1, 0.01, 8)])
    panel.finish("done")
    assert len(display.shown) == 2, "opened, and drawn as ended"
    panel.finish("done")
    assert len(display.shown) == 2


def test_a_panel_that_fails_is_given_up_with_one_warning(
    display: FakeDisplay, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def broken(_: object) -> bytes:
        raise OSError("no fonts")

    monkeypatch.setattr("accel_nb.ui.picture.draw_png", broken)
    panel = Panel("run", 2, display="picture")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            panel.feed(training_events(5))
            panel.refresh(force=True)
        panel.finish("done")
    assert [record.message for record in caplog.records] == [
        "the panel failed and is no longer drawn; the run continues"
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
            browser.said = message["facts"]["action_result"]

        monkeypatch.setattr("accel_nb.ui.widget.PanelWidget.send", send)


def test_a_panel_that_is_attached_to_has_everything_once_and_goes_on_in_both_places(
    display: FakeDisplay, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("accel_nb.ui.panel.BYTES_PER_S", 1 << 30)  # else it is sent the extremes: see the next test
    browser = Browser(monkeypatch)
    asked: list[object] = []
    panel = Panel("run", 2, display="widget", on_control=asked.append)
    events = list(training_events(300))
    panel.attach()
    assert not panel.is_shown, "there is nothing to draw yet"
    for index, event in enumerate(events):
        panel.feed([event])
        if index in (100, 400, 700):
            panel.refresh(force=True)
        if index == 500:
            panel.attach()
    panel.show_action_result("learning rate 0.1 -> 0.05")
    panel.refresh(force=True)
    expected = {key: table.total for key, table in panel.state.tables.items() if table.total}
    assert browser.rows == [expected, expected]
    assert browser.said == "learning rate 0.1 -> 0.05"
    second: Any = panel._displays[1]
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
    panel = Panel("run", 2, display="widget")
    events = list(training_events(5000))
    panel.feed(events[:8])
    panel.refresh()
    panel.feed(events[8:])
    panel.refresh(force=True)
    assert sum(size for _, size in sent) < 5000 * 3 * 6 * 8 / 4, "a share of all the rows"
    panel_display: Any = panel._displays[0]
    for wrong in (
        {"first": "1"},
        {"table": "memory"},
        {"last": float("nan")},
        {"last": 10**400},
        {"name": 1},
        {"first": True},
    ):
        question = {"kind": "detail", "table": "step", "name": "", "first": 1000, "last": 1009}
        panel_display._on_message(None, question | wrong, [])
    panel.finish("done")
    before = len(sent)
    panel_display._on_message(None, {"kind": "detail", "table": "step", "name": "", "first": 1000, "last": 1009}, [])
    ((answer, size),) = sent[before:]
    assert answer["kind"] == "detail"
    assert {(block["rank"], block["rows"]) for block in answer["blocks"]} == {(0, 10), (1, 10), (-1, 10)}
    assert size == 30 * 6 * 8


def test_what_was_said_is_sent_although_nothing_else_is_new(display: FakeDisplay, monkeypatch: pytest.MonkeyPatch):
    browser = Browser(monkeypatch)
    panel = Panel("run", 2, display="widget")
    panel.feed(training_events(5))
    panel.refresh(force=True)
    panel.show_action_result("stopping after this step ...")
    panel_display: Any = panel._displays[0]
    panel_display._next_at = 0.0
    panel.refresh()
    assert browser.said == "stopping after this step ..."


def answers_of(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], bytes]]:
    """Return what widgets send from now on that answers a question."""
    sent: list[tuple[dict[str, Any], bytes]] = []

    def send(_widget: Any, message: dict[str, Any], buffers: Any) -> None:
        if message["kind"] not in ("delta", "snapshot"):
            sent.append((message, buffers[0]))

    monkeypatch.setattr("accel_nb.ui.widget.PanelWidget.send", send)
    return sent


def test_named_losses_of_an_ended_run_can_be_compared_with():
    state = PanelState("gan", 1)
    for step in (1, 2):
        state.apply([StepDone(0, step, step, step / 4, 0.1, 0.1, 8, curve=curve) for curve in ("d_loss", "g_loss")])
    runs = EarlierRuns()
    runs.keep(1, state)
    (run,) = runs.others(2)
    for name in ("d_loss", "g_loss"):
        (block,) = run.blocks("step", name)
        assert list(block.columns[1]) == [0.25, 0.5]
    (unnamed,) = run.blocks("step", "")
    assert (unnamed.name, list(unnamed.columns[0])) == ("", [1.0, 3.0]), "those of the first loss, for the axes"


def test_states_of_long_ended_runs_are_freed():
    runs, states = EarlierRuns(), [PanelState("cell", 1) for _ in range(MAX_KEPT_RUNS + 1)]
    oldest, newest = weakref.ref(states[0]), weakref.ref(states[-1])
    while states:
        runs.keep(len(states), states.pop(0))
    gc.collect()
    assert oldest() is None
    assert newest() is not None


def test_runs_that_have_ended_can_be_compared_with_while_one_runs_and_after_it(
    display: FakeDisplay, monkeypatch: pytest.MonkeyPatch
):
    sent = answers_of(monkeypatch)
    runs = EarlierRuns()
    hostile = "<img src=x onerror=alert(1)>"
    for title in ("a", "b", "c", "d", "e", hostile):
        earlier = Panel(title, 2, display="text", earlier=runs)
        earlier.feed(training_events(8_000 if title == hostile else 20))
        earlier.finish("done")
    Panel("draws nothing", 1, display="text", earlier=runs).finish("done")
    panel = Panel("now", 2, display="widget", earlier=runs)
    panel.feed(training_events(10))
    panel.refresh()
    assert panel.state.facts()["num_earlier"] == 5
    panel_display: Any = panel._displays[0]

    def ask(**question: Any) -> list[tuple[dict[str, Any], bytes]]:
        sent.clear()
        panel_display._on_message(None, {"kind": "earlier", "version": 1, **question}, [])
        panel.refresh(force=True)
        return list(sent)

    def check() -> None:
        ((listed, _),) = ask()
        assert [run["title"] for run in listed["runs"]] == [hostile, "e", "d", "c", "b"]
        assert listed["runs"][1]["summary"].startswith("20 steps, loss ")
        number = listed["runs"][0]["run"]
        ((curve, buffer),) = ask(run=number, table="step", name="")
        (block,) = curve["blocks"]
        assert curve["run"] == number
        assert curve["num_workers"] == 2
        assert 1000 < block["rows"] <= 2000, "thinned, within what the wire carries"
        values = np.frombuffer(buffer).reshape(6, -1)
        assert values[0, -1] == 8_000
        assert np.nanmax(values[1]) > 2, "the extremes stay"
        ((metric, _),) = ask(run=number, table="metric", name="accuracy")
        assert [block["name"] for block in metric["blocks"]] == ["accuracy"]
        for unknown in ({"run": 999, "table": "step", "name": ""}, {"run": number, "table": "metric", "name": "x"}):
            ((nothing, buffer),) = ask(**unknown)
            assert nothing["blocks"] == []
            assert buffer == b""
        for wrong in ({"run": "1"}, {"run": True, "table": "step", "name": ""}, {"run": 1, "table": "memory"}):
            assert ask(**wrong) == []

    check()
    panel.finish("done")
    check()
    del panel.state  # the kernel keeps nothing of the run but its widget: the others are there all the same
    check()


def test_a_flood_of_queries_is_cut(display: FakeDisplay, monkeypatch: pytest.MonkeyPatch):
    sent = answers_of(monkeypatch)
    panel = Panel("now", 2, display="widget")
    panel.feed(training_events(10))
    panel.refresh()
    panel_display: Any = panel._displays[0]
    for run in range(1000):
        panel_display._on_message(None, {"kind": "earlier", "run": run, "table": "step", "name": ""}, [])
    panel.refresh(force=True)
    assert len(sent) == MAX_QUERIES


def test_a_page_that_was_reloaded_has_what_the_cell_prints(display: FakeDisplay, monkeypatch: pytest.MonkeyPatch):
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr("accel_nb.ui.widget.PanelWidget.send", lambda _, message, buffers: sent.append(message))
    panel = Panel("run", 2, display="widget")
    panel.feed(training_events(5))
    panel.add_text("epoch 0\n")
    panel.refresh(force=True)
    panel_display: Any = panel._displays[0]
    for page in ("first", "second"):
        panel_display._on_message(None, {"kind": "resync", "version": 1, "seq": 0, "page": page}, [])
        panel.refresh(force=True)
    panel.add_text("epoch 1\n")
    panel_display._next_at = 0.0
    panel.refresh()
    assert [(message.get("text"), message.get("page")) for message in sent] == [
        (None, None),
        (None, None),
        ("epoch 0\n", "second"),
        ("epoch 0\nepoch 1\n", None),
    ]


def test_the_csv_of_a_long_run_is_a_file(display: FakeDisplay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    answers = answers_of(monkeypatch)
    panel = Panel("a/b run", 1, display="widget")
    for num_steps, files in ((300, []), (20_000, ["a-b-run.csv"])):
        panel.state.apply(training_events(num_steps, num_ranks=1))
        panel.refresh(force=True)
        panel_display: Any = panel._displays[0]
        panel_display._on_message(None, {"kind": "csv"}, [])
        panel.refresh(force=True)
        answer = answers.pop()[0]
        assert [path.name for path in tmp_path.iterdir()] == files
        text = (tmp_path / answer["file"]).read_text() if files else answer["text"]
        assert text.count("\n") == 1 + len(panel.state.tables["step", 0, ""])
