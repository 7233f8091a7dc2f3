"""Asking a run under way for something: what is let through, and that all ranks do it after the same step."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedules
from torch.utils.data import DataLoader, TensorDataset

from accel_nb.accelerator import Accelerator
from accel_nb.accelerator.training.lr_control import scale_learning_rates
from accel_nb.accelerator.training.run_control import (
    ControlReceiver,
    TrainingStopped,
    current_control_receiver,
    describe_value,
)
from accel_nb.notebook.magics import parse_set_arguments
from accel_nb.notebook.session.run_controls import MAX_PER_SECOND, NO_CHECKPOINT_DIR, RunControls
from accel_nb.pool.control.coordination import (
    ANSWER_TIMEOUT_S,
    MAX_QUEUED,
    ActionQueue,
    ControlAction,
    ControlCoordinator,
)
from accel_nb.pool.messages import ActionDone, DecideAction, ProposeAction, StepCount
from accel_nb.runtime.world import World
from accel_nb.telemetry.actions import (
    Inspect,
    SaveNow,
    ScaleLearningRate,
    SetLearningRate,
    SetReportInterval,
    StopAfterStep,
    read_action,
    to_message,
)
from accel_nb.telemetry.events import ControlApplied, Event, MetricLogged, StepDone, from_message
from accel_nb.telemetry.events import to_message as event_message
from accel_nb.ui.view import PanelState

ACTIONS = [
    StopAfterStep(),
    SaveNow(),
    ScaleLearningRate(0.5),
    SetLearningRate(3e-4),
    SetReportInterval(10),
    Inspect(("loss", "model")),
]


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.kind)
def test_an_action_survives_its_message(action: Any):
    assert read_action(to_message(action)) == action


@pytest.mark.parametrize(
    "message",
    [
        None,
        [],
        "stop",
        {},
        {"kind": 1},
        {"kind": ["stop"]},
        {"kind": "exec", "code": "1"},
        {"kind": "stop", "now": True},
        {"kind": "set_rate"},
        {"kind": "set_rate", "value": "0.1"},
        {"kind": "set_rate", "value": True},
        {"kind": "set_rate", "value": math.nan},
        {"kind": "set_rate", "value": math.inf},
        {"kind": "set_rate", "value": 0},
        {"kind": "set_rate", "value": 1e9},
        {"kind": "set_rate", "value": 10**400},
        {"kind": "set_rate", "value": -(10**400)},
        {"kind": "scale_rate", "factor": -1},
        {"kind": "scale_rate", "factor": 1e300},
        {"kind": "interval", "steps": 0},
        {"kind": "interval", "steps": 2.0},
        {"kind": "interval", "steps": 10**9},
        {"kind": "inspect", "names": 5},
        {"kind": "inspect", "names": None},
        {"kind": "inspect", "names": []},
        {"kind": "inspect", "names": ["__import__('os')"]},
        {"kind": "inspect", "names": ["x"] * 17},
        {"kind": "inspect", "names": [1]},
        {"kind": "inspect", "names": {"a": 1}},
    ],
    ids=lambda message: repr(message)[:60],
)
def test_what_is_no_action_is_refused_and_counted(message: object):
    controls = RunControls(can_save=True)
    said: list[str] = []
    controls.show_message = lambda text, is_final: said.append(text)
    controls.handle_message(message)
    assert controls.num_rejected == 1
    assert controls.queue.pop() is None
    assert said[0].startswith("not done: ")


def test_a_flood_is_counted_and_not_listened_to():
    now = [0.0]
    controls = RunControls(can_save=True, clock=lambda: now[0])
    for _ in range(100):
        controls.handle_message({"kind": "interrupt"})
    assert controls.queue.num_interrupts == MAX_PER_SECOND
    assert controls.num_rejected == 100 - MAX_PER_SECOND
    now[0] = 1.0
    controls.handle_message({"kind": "interrupt"})
    assert controls.queue.num_interrupts == MAX_PER_SECOND + 1


def test_requests_are_bounded_and_none_is_left_open():
    requests = ActionQueue()
    asked = [ControlAction(to_message(StopAfterStep())) for _ in range(MAX_QUEUED + 1)]
    for action in asked:
        requests.add(action)
    assert [action.text for action in asked if action.wait(0)] == [
        f"not done: {MAX_QUEUED} others wait for the end of a step"
    ]
    requests.close()
    requests.add(late := ControlAction(to_message(StopAfterStep())))
    assert all(action.wait(0) and action.step is None for action in [*asked, late])


def test_a_checkpoint_without_a_folder_is_answered_at_once():
    controls = RunControls(can_save=False)
    said: list[str] = []
    controls.show_message = lambda text, is_final: said.append(text)
    action = controls.request(SaveNow())
    assert action.wait(0)
    assert said == [NO_CHECKPOINT_DIR]


class Rank:
    """A loop that comes to the end of one step after the other, and a monitor that answers beside it."""

    def __init__(self, run: ThreadEngine, rank: int) -> None:
        self.done: list[tuple[int, int]] = []
        self.receiver = ControlReceiver(
            lambda action, step, text: run.coordinator.record_done(rank, ActionDone(1, action, step, text)), str
        )
        self.num_steps = 0

    def run_action(self, action: Any) -> str:
        self.done.append((self.receiver.count, action.steps))
        return ""

    def run(self, num_steps: int, chance: random.Random, barrier: threading.Barrier) -> None:
        for step in range(num_steps):
            for _ in range(chance.randrange(200)):
                pass
            if step % 50 == 0:
                barrier.wait(20)  # ranks are a few steps apart at most, as collectives keep them
            self.num_steps = step
            self.receiver.count += 1
            if self.receiver.is_pending:
                self.receiver.run_due_actions(self)  # type: ignore[arg-type]


class ThreadEngine:
    """An engine whose ranks are threads of this process."""

    def __init__(self, size: int) -> None:
        self.requests = ActionQueue()
        self.coordinator = ControlCoordinator(self, 1, self.requests)  # type: ignore[arg-type]
        self.ranks = [Rank(self, rank) for rank in range(size)]
        self.silent: set[int] = set()
        self.answers: list[tuple[int, StepCount]] = []

    def send(self, rank: int, record: Any, *, urgent: bool) -> bool:
        assert urgent
        if isinstance(record, ProposeAction) and rank not in self.silent:
            at = self.ranks[rank].receiver.propose(record.action_id, read_action(record.action))
            self.answers.append((rank, StepCount(1, record.action_id, at)))
        elif isinstance(record, DecideAction):
            self.ranks[rank].receiver.decide(record.action_id, record.count)
        return True

    def turn(self) -> None:
        self.coordinator.update(set(range(len(self.ranks))))
        answers, self.answers = self.answers, []
        for rank, answer in answers:
            self.coordinator.record_count(rank, answer)


def test_all_ranks_do_it_after_the_same_step_wherever_they_are():
    run, num_steps, chance = ThreadEngine(3), 1000, random.Random(4)
    barrier = threading.Barrier(3)
    threads = [
        threading.Thread(target=rank.run, args=(num_steps, random.Random(index), barrier))
        for index, rank in enumerate(run.ranks)
    ]
    for thread in threads:
        thread.start()
    asked: list[ControlAction] = []
    while any(thread.is_alive() for thread in threads):
        if chance.random() < 0.01 and len(asked) < 200:
            asked.append(ControlAction(to_message(SetReportInterval(len(asked) + 1))))
            run.requests.add(asked[-1])
        run.turn()
    run.coordinator.close()
    done = run.ranks[0].done
    assert done, "nothing was asked while they ran"
    assert all(rank.done == done for rank in run.ranks)
    assert all(action.wait(0) for action in asked)
    assert len(done) == sum(action.step is not None for action in asked)


def test_a_rank_that_does_not_answer_delays_no_rank_for_long():
    run, now = ThreadEngine(2), [0.0]
    run.coordinator.clock = lambda: now[0]
    run.silent.add(1)
    run.requests.add(action := ControlAction(to_message(StopAfterStep())))
    run.turn()
    assert run.ranks[0].receiver.is_pending
    now[0] = ANSWER_TIMEOUT_S + 0.1
    run.turn()
    assert not run.ranks[0].receiver.is_pending
    assert action.text == "not done: rank 1 did not answer within 2 s"
    run.coordinator.record_count(1, StepCount(1, 1, 5))  # it comes too late
    assert not run.ranks[0].receiver.is_pending


def test_no_rank_is_held_where_the_run_is_being_stopped():
    run = ThreadEngine(2)
    run.silent.add(1)
    run.requests.add(action := ControlAction(to_message(StopAfterStep())))
    run.turn()
    run.coordinator.cancel()
    assert not run.ranks[0].receiver.is_pending
    assert action.text == "not done: the cell is being stopped"


def test_a_rank_whose_cell_has_not_begun_is_asked_again():
    run, now = ThreadEngine(2), [0.0]
    run.coordinator.clock = lambda: now[0]
    run.silent.add(1)
    run.requests.add(action := ControlAction(to_message(SetReportInterval(2))))
    run.turn()
    run.coordinator.record_count(1, StepCount(1, 1, None))
    assert not run.ranks[0].receiver.is_pending, "no rank is held meanwhile"
    run.silent.clear()
    now[0] = 1.0
    run.turn()
    for rank in run.ranks:
        rank.receiver.count += 1
        rank.receiver.run_due_actions(rank)  # type: ignore[arg-type]
    assert [rank.done for rank in run.ranks] == [[(1, 2)]] * 2
    assert action.wait(0)


SCHEDULES = {
    "step": lambda optimizer: schedules.StepLR(optimizer, 4, 0.5),
    "exponential": lambda optimizer: schedules.ExponentialLR(optimizer, 0.9),
    "cosine": lambda optimizer: schedules.CosineAnnealingLR(optimizer, 20),
    "restarts": lambda optimizer: schedules.CosineAnnealingWarmRestarts(optimizer, 7),
    "lambda": lambda optimizer: schedules.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "one cycle": lambda optimizer: schedules.OneCycleLR(optimizer, max_lr=[0.1, 0.2], total_steps=40),
    "cyclic": lambda optimizer: schedules.CyclicLR(optimizer, 0.01, 0.1, step_size_up=5, cycle_momentum=False),
    "sequence": lambda optimizer: schedules.SequentialLR(
        optimizer,
        [schedules.LinearLR(optimizer, 0.1, total_iters=5), schedules.CosineAnnealingLR(optimizer, 20)],
        milestones=[5],
    ),
}


def rates_of(name: str, factor: float) -> list[list[float]]:
    optimizer = torch.optim.SGD(
        [{"params": [torch.nn.Parameter(torch.ones(1))]}, {"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.02}],
        lr=0.1,
    )
    scheduler = SCHEDULES[name](optimizer)
    rates = []
    for step in range(30):
        optimizer.step()
        if step == 9:
            scale_learning_rates([optimizer], [scheduler], factor)
        scheduler.step()
        rates.append([group["lr"] for group in optimizer.param_groups])
        assert scheduler.get_last_lr() == rates[-1]
    return rates


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_goes_on_as_planned_times_the_factor(name: str):
    planned, scaled = rates_of(name, 1.0), rates_of(name, 0.25)
    assert scaled[:9] == planned[:9]
    for ours, theirs in zip(scaled[9:], planned[9:], strict=True):
        assert ours == pytest.approx([0.25 * rate for rate in theirs], abs=1e-6)  # floors stay


def test_a_rate_that_groups_share_is_scaled_once():
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizer = torch.optim.Adam([{"params": [value]} for value in parameters], lr=torch.tensor(0.1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    scale_learning_rates([optimizer], [scheduler], 0.5)
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.05, 0.05])
    assert [float(rate) for rate in scheduler.base_lrs] == pytest.approx([0.05, 0.05])


class Keeping:
    """Keeps events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)


def run_with_actions(
    requests: dict[int, Any], num_epochs: int, names: Mapping[str, Any] | None = None, **options: Any
) -> tuple[Accelerator, Any, Keeping, list[str]]:
    """Train a line, with what is asked for right after the steps that ``requests`` names."""
    shown_text: list[str] = []
    values = {"a": "a", "b": "b", **(names or {})}
    receiver = ControlReceiver(
        lambda action, step, text: shown_text.append(f"{step}: {text}"), lambda name: describe_value(values[name])
    )
    token, sink = current_control_receiver.set(receiver), Keeping()
    try:
        accelerator = Accelerator(world=World(), cpu=True, sink=sink, seed=1, **options)
    finally:
        current_control_receiver.reset(token)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.arange(10.0).unsqueeze(1)), batch_size=2)
    accelerator.prepare(model, optimizer, loader)
    step = 0
    try:
        for _ in range(num_epochs):
            for (x,) in loader:
                accelerator.backward(model(x / 10).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                accelerator.log({"steps": step})
                if step in requests:
                    receiver.decide(step, receiver.propose(step, requests[step]) + 1)
    except TrainingStopped:
        assert receiver.stopped_step == step
    return accelerator, optimizer, sink, shown_text


def test_an_accelerator_does_what_is_asked_between_two_steps(tmp_path: Any):
    requests = {
        2: SetLearningRate(0.01),
        4: ScaleLearningRate(3),
        6: SetReportInterval(4),
        10: SaveNow(),
        13: StopAfterStep(),
    }
    config = {"checkpoint": {"dir": str(tmp_path)}}
    accelerator, optimizer, sink, shown_text = run_with_actions(requests, 10, config=config)
    assert shown_text == [
        "2: learning rate 0.1 -> 0.01",
        "4: learning rate 0.01 -> 0.03",
        "6: every 4 steps are reported",
        "10: step 10 is being saved",
        "13: stopped after step 13: step 13 is being saved",
    ]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.03)
    steps = [event for event in sink.events if isinstance(event, StepDone)]
    assert [event.step for event in steps] == [1, 2, 3, 4, 5, 6, 8, 12]
    assert [event.learning_rate for event in steps[:6]] == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.03, 0.03])
    assert [event.num_samples for event in steps] == [2] * 6 + [4, 8]
    logged = [event.value for event in sink.events if isinstance(event, MetricLogged)]
    assert logged == [1, 2, 3, 4, 5, 6, 8, 12]
    accelerator.end_run()
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_10", "step_13"]
    accelerator.begin_run()
    assert accelerator.components.stepper.meter.is_reporting, "a logging interval is the cell's"
    accelerator.close()


def test_without_a_folder_nothing_is_saved_and_the_run_goes_on():
    accelerator, _, _, shown_text = run_with_actions({2: SaveNow(), 3: Inspect(("a", "b"))}, 1)
    assert shown_text == ["2: not saved: give the folder for checkpoints with --checkpoint DIR", "3: a = 'a'\nb = 'b'"]
    accelerator.close()


def test_a_value_that_cannot_be_shown_does_not_end_the_run():
    names = {"lazy": torch.nn.Sequential(torch.nn.LazyLinear(2)), "empty": torch.ones(2, device="meta"), "x": 3}
    accelerator, _, _, shown_text = run_with_actions({2: Inspect(("lazy", "empty", "x"))}, 1, names)
    [text] = shown_text
    lazy, empty, x = text.splitlines()
    assert lazy.startswith("2: lazy = not available: ValueError: ")
    assert empty.startswith("empty = not available: NotImplementedError: ")
    assert x == "x = 3"
    assert accelerator.components.stepper.num_steps == 5
    accelerator.close()


def test_the_reported_loss_is_the_mean_of_the_steps_since_the_last_report():
    _, _, every, _ = run_with_actions({}, 2)
    _, _, third, _ = run_with_actions({1: SetReportInterval(3)}, 2)
    losses = {event.step: event.loss for event in every.events if isinstance(event, StepDone)}
    reported = {event.step: event.loss for event in third.events if isinstance(event, StepDone)}
    assert list(reported) == [1, 3, 6, 9]
    assert reported[3] == pytest.approx((losses[2] + losses[3]) / 2)
    assert reported[9] == pytest.approx((losses[7] + losses[8] + losses[9]) / 3)


def test_values_are_described_in_a_line():
    assert describe_value(torch.ones(2)) == "Tensor of shape (2,), torch.float32, on cpu: [1.0, 1.0]"
    assert describe_value(torch.ones(9, 9)) == "Tensor of shape (9, 9), torch.float32, on cpu"
    assert describe_value(torch.nn.Linear(2, 3)) == "Linear with 9 parameters"
    assert len(describe_value("x" * 10**6)) <= 200


def test_a_panel_marks_and_says_what_was_done():
    state = PanelState("run", 1)
    for step in (1, 2, 12, 22):
        state.apply([StepDone(0, step, step * 0.1, 0.5, 0.1, 0.1, 8)])
    state.apply([from_message(event_message(ControlApplied(0, 12, 2.0, "learning rate 0.1 -> 0.05")))])
    state.set_action_result("learning rate 0.1 -> 0.05, after step 12\n<b>")
    assert (state.marks[-1].kind, state.marks[-1].x) == ("control", 12)
    assert state.ranks.num_steps == 22, "a report stands for the steps since the last"
    assert state.facts()["action_result"] == "learning rate 0.1 -> 0.05, after step 12"
    state.accepts_actions = True
    state.finish("done")
    assert not state.facts()["accepts_actions"]


def test_settings_are_read():
    assert parse_set_arguments(["lr=3e-4", "lr*=0.5", "log-every=10", "log_every=5"]) == [
        SetLearningRate(3e-4),
        ScaleLearningRate(0.5),
        SetReportInterval(10),
        SetReportInterval(5),
    ]


@pytest.mark.parametrize("words", [[], ["lr"], ["lr=fast"], ["lr+=1"], ["=1"], ["lr=nan"], ["log-every=1.5"], ["x=1"]])
def test_wrong_settings_are_refused(words: list[str]):
    with pytest.raises(ValueError, match=r"rate|lr|log"):
        parse_set_arguments(words)
