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


@pytest.mark.parametrize(
    "code", ["for x in loader: x.backward()", EPOCHS.format("range(n())"), EPOCHS.format(f"range({10**30})"), "x = 1"]
)
def test_what_cannot_be_read_is_not_guessed(code: str):
    assert plan(code) is None
    assert plan(EPOCHS.format("range(3)") + "\n" + EPOCHS.format("range(3)")) is None


class Run:
    """Sends the events of a run to a panel; a step takes 0.1 s."""

    def __init__(self, plan: LoopPlan | None, first_step: int = 0) -> None:
        self.state, self.step, self.first = PanelState("run", 1, plan=plan), first_step, first_step

    def begin(self, num_steps: int, loader: int = 0, epoch: int = 0) -> None:
        self.state.apply([EpochBegan(0, self.step, 0.1 * (self.step - self.first), num_steps, loader, epoch)])

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.step += 1
            self.state.apply([StepDone(0, self.step, 0.1 * (self.step - self.first), 0.5, 0.1, 0.1, 8)])


def run(num_epochs: int, per_epoch: int, *, plan: LoopPlan | None, evaluates: int = 0) -> PanelState:
    """Run epochs, with an evaluation after each ``evaluates``-th step."""
    made, num_evaluations = Run(plan), 0
    for epoch in range(num_epochs):
        made.begin(per_epoch, epoch=epoch)
        for number in range(per_epoch):
            made.steps(1)
            if evaluates and (number + 1) % evaluates == 0:
                made.begin(3, loader=1, epoch=num_evaluations)
                num_evaluations += 1
    return made.state


@pytest.mark.parametrize("evaluates", [0, 5, 20])
def test_progress_is_that_of_the_cells_loops(evaluates: int):
    state = run(3, 20, plan=LoopPlan("epochs", 10), evaluates=evaluates)
    progress = state.progress
    assert progress["fraction"] == pytest.approx(0.3)
    assert progress["remaining_s"] == pytest.approx(14.0)
    assert (progress["epoch"], progress["num_epochs"]) == (3, 10)
    state.finish("done")
    assert state.progress["remaining_s"] is None


def test_without_a_range_the_epoch_alone_has_a_part():
    state = run(1, 20, plan=None)
    state.apply(
        [EpochBegan(0, 20, 2.0, 20, 0, 1), *(StepDone(0, step, 0.1 * step, 0.5, 0.1, 0.1, 8) for step in range(21, 26))]
    )
    assert state.progress["fraction"] is None
    assert state.progress["batch_fraction"] == pytest.approx(0.25)
    assert state.progress["epoch"] == 2


def test_an_evaluation_in_the_first_epoch_does_not_end_it():
    made = Run(LoopPlan("epochs", 2))
    made.begin(100)
    for number in range(2):
        made.steps(25)
        made.begin(4, loader=1, epoch=number)
    progress = made.state.progress
    assert (progress["epoch"], progress["batch_fraction"], progress["fraction"]) == (1, 0.5, 0.25)
    assert progress["remaining_s"] == pytest.approx(15.0)


def test_a_loop_that_trains_nothing_is_no_epoch():
    made = Run(LoopPlan("epochs", 2))
    made.begin(10)
    made.begin(10, epoch=1)
    made.steps(5)
    assert made.state.progress["fraction"] == pytest.approx(0.25)
    assert made.state.progress["epoch"] == 1


def test_loaders_that_are_trained_on_one_after_the_other_are_counted_together():
    made = Run(LoopPlan("epochs", 6))
    for fold in range(3):
        for epoch in range(2):
            made.begin(10, loader=2 * fold, epoch=epoch)
            made.steps(10)
            made.begin(2, loader=2 * fold + 1, epoch=epoch)
    assert made.state.progress["epoch"] == 6
    assert made.state.progress["fraction"] == pytest.approx(1.0)


def test_loops_that_evaluate_on_a_loader_are_no_epochs_of_a_later_training_on_it():
    made = Run(LoopPlan("epochs", 6))
    for epoch in range(3):
        made.begin(10, loader=0, epoch=epoch)
        made.steps(10)
        made.begin(10, loader=1, epoch=epoch)
    for epoch in range(2):
        made.begin(10, loader=1, epoch=3 + epoch)
        made.steps(10)
        assert made.state.progress["epoch"] == (4 if epoch else 3) + epoch
    made.begin(10, loader=1, epoch=5)
    assert made.state.progress["fraction"] == pytest.approx(5 / 6)


def test_a_resumed_run_begins_with_the_epochs_of_its_checkpoint():
    made = Run(LoopPlan("epochs", 10), first_step=900)
    for _ in range(9):
        made.begin(100, epoch=9)  # loops over finished epochs yield nothing
    made.begin(100, epoch=9)
    made.steps(50)
    progress = made.state.progress
    assert (progress["epoch"], progress["fraction"]) == (10, 0.95)
    assert progress["remaining_s"] == pytest.approx(5.0)


def test_a_resumed_run_of_steps_expects_the_time_of_those_that_remain():
    made = Run(LoopPlan("steps", 1000), first_step=900)
    made.begin(0)
    made.steps(10)
    assert made.state.progress["fraction"] == pytest.approx(0.91)
    assert made.state.progress["remaining_s"] == pytest.approx(9.0)


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
