"""Progress of a run, and the loops that it is read from."""

import ast
import io

import pytest

from accel_nb.notebook.cells.loop_plan import find_loop_plan
from accel_nb.telemetry.events import EpochBegan, StepDone
from accel_nb.ui.progress import LoopPlan
from accel_nb.ui.terminal import TerminalDisplay, clock, progress_line
from accel_nb.ui.view import PanelState

EPOCHS = "for epoch in {}:\n    for x in loader:\n        loss.backward()"


def plan(code: str, **names: object) -> LoopPlan | None:
    return find_loop_plan(ast.parse(code), names)


@pytest.mark.parametrize("iterable", ["range(10)", "range(num)", "range(2, 12)", "tqdm(range(10))", "trange(5 * 2)"])
def test_epochs_are_read_from_the_outermost_loop(iterable: str):
    assert plan(EPOCHS.format(iterable), num=10) == LoopPlan("epochs", 10)


def test_steps_are_read_from_a_loop_without_another():
    assert plan("n = 300\nfor step in range(n):\n    loss.backward()\n    optimizer.step()") == LoopPlan("steps", 300)


@pytest.mark.parametrize("code", ["for x in loader: x.backward()", EPOCHS.format("range(n())"), "x = 1"])
def test_what_cannot_be_read_is_not_guessed(code: str):
    assert plan(code) is None
    assert plan(EPOCHS.format("range(3)") + "\n" + EPOCHS.format("range(3)")) is None


def run(num_epochs: int, per_epoch: int, *, plan: LoopPlan | None, evaluates: bool = False) -> PanelState:
    state, step = PanelState("run", 1, plan=plan), 0
    for _ in range(num_epochs):
        state.fold([EpochBegan(0, step, 0.1 * step, per_epoch)])
        for _ in range(per_epoch):
            step += 1
            state.fold([StepDone(0, step, 0.1 * step, 0.5, 0.1, 0.1, 8)])
        if evaluates:
            state.fold([EpochBegan(0, step, 0.1 * step, 3)])
    return state


@pytest.mark.parametrize("evaluates", [False, True])
def test_progress_is_that_of_the_cells_loops(evaluates: bool):
    state = run(3, 20, plan=LoopPlan("epochs", 10), evaluates=evaluates)
    progress = state.progress
    assert progress["fraction"] == pytest.approx(0.3)
    assert progress["remaining_s"] == pytest.approx(14.0)
    assert (progress["epoch"], progress["num_epochs"]) == (3, 10)
    state.finish("done")
    assert state.progress["remaining_s"] is None


def test_without_a_range_the_epoch_alone_has_a_part():
    state = run(1, 20, plan=None)
    state.fold(
        [EpochBegan(0, 20, 2.0, 20), *(StepDone(0, step, 0.1 * step, 0.5, 0.1, 0.1, 8) for step in range(21, 26))]
    )
    assert state.progress["fraction"] is None
    assert state.progress["batch_fraction"] == pytest.approx(0.25)
    assert state.progress["epoch"] == 2


def test_a_cell_that_loops_more_often_than_it_seems_shows_no_wrong_part():
    assert run(3, 5, plan=LoopPlan("epochs", 2)).progress["fraction"] is None


def test_a_terminals_line_is_written_over_and_makes_room(monkeypatch: pytest.MonkeyPatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    written = Terminal()
    monkeypatch.setattr("sys.stdout", written)
    state = run(3, 20, plan=LoopPlan("epochs", 10))
    display = TerminalDisplay()
    display.open(state)
    assert written.getvalue().startswith("\r\x1b[Kepoch 3/10  ━━━━━━━───")
    assert "\n" not in written.getvalue()
    display.prepare_for_text()
    assert written.getvalue().endswith("\r\x1b[K")
    display.close(state)
    assert written.getvalue().endswith(state.summary() + "\n")


def test_lines_of_a_file_are_whole_and_few(monkeypatch: pytest.MonkeyPatch):
    written = io.StringIO()
    monkeypatch.setattr("sys.stdout", written)
    state = run(3, 20, plan=LoopPlan("epochs", 10))
    display = TerminalDisplay()
    display.open(state)
    display.update(state, force=False)
    display.prepare_for_text()
    display.close(state)
    assert written.getvalue() == state.summary() + "\n"


def test_a_narrow_terminal_keeps_the_remaining_time():
    line = progress_line(run(3, 20, plan=LoopPlan("epochs", 10)), 60)
    assert len(line) <= 60
    assert line.endswith("0:14 left")
    assert clock(3723) == "1:02:03"
