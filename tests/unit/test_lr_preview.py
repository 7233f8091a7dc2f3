"""The planned learning rate: what a schedule then gives, found without touching it."""

from __future__ import annotations

import copy
import functools
import math
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.utils.data import DataLoader, TensorDataset

from accel_nb.accelerator import Accelerator
from accel_nb.accelerator.training.lr_preview import preview_learning_rates
from accel_nb.accelerator.training.pure_function import is_pure
from accel_nb.telemetry.events import Event, LearningRatePlan, StepDone, from_message, to_message
from accel_nb.ui.view import PanelState

WARMUP = 5


def warm(step: int) -> float:
    return min(1.0, (step + 1) / WARMUP) * 0.5 * (1 + math.cos(math.pi * step / 100))


def linear(step: int, *, num_warmup_steps: int, num_training_steps: int) -> float:
    if step < num_warmup_steps:
        return step / max(1, num_warmup_steps)
    return max(0.0, (num_training_steps - step) / (num_training_steps - num_warmup_steps))


def sequence(optimizer: Any) -> Any:
    first = schedules.LinearLR(optimizer, 0.1, total_iters=7)
    second = schedules.CosineAnnealingLR(optimizer, T_max=30)
    return schedules.SequentialLR(optimizer, [first, second], milestones=[7])


def chain(optimizer: Any) -> Any:
    return schedules.ChainedScheduler(
        [schedules.ConstantLR(optimizer, 0.1, total_iters=4), schedules.ExponentialLR(optimizer, 0.9)]
    )


SCHEDULES: dict[str, tuple[Any, int | None]] = {
    "function": (lambda optimizer: schedules.LambdaLR(optimizer, warm), None),
    "transformers": (
        lambda optimizer: schedules.LambdaLR(
            optimizer, functools.partial(linear, num_warmup_steps=3, num_training_steps=40)
        ),
        40,
    ),
    "steps": (lambda optimizer: schedules.StepLR(optimizer, 5, 0.5), None),
    "milestones": (lambda optimizer: schedules.MultiStepLR(optimizer, [4, 20]), 20),
    "constant": (lambda optimizer: schedules.ConstantLR(optimizer, 0.5, total_iters=6), 6),
    "linear": (lambda optimizer: schedules.LinearLR(optimizer, 0.1, total_iters=12), 12),
    "exponential": (lambda optimizer: schedules.ExponentialLR(optimizer, 0.95), None),
    "polynomial": (lambda optimizer: schedules.PolynomialLR(optimizer, 25, 2.0), 25),
    "cosine": (lambda optimizer: schedules.CosineAnnealingLR(optimizer, 40, 1e-4), 40),
    "one cycle": (lambda optimizer: schedules.OneCycleLR(optimizer, 0.5, total_steps=50), 49),
    "cycles": (lambda optimizer: schedules.CyclicLR(optimizer, 0.01, 0.1, step_size_up=9), 18),
    "restarts": (lambda optimizer: schedules.CosineAnnealingWarmRestarts(optimizer, 10, 2), 10),
    "factors": (lambda optimizer: schedules.MultiplicativeLR(optimizer, lambda step: 0.97), None),
    "sequence": (sequence, 37),
    "chain": (chain, 4),
}


def trained(make: Any) -> tuple[torch.optim.Optimizer, Any]:
    model = nn.Linear(2, 1)
    groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.3}]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    return optimizer, make(optimizer)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_before", [0, 3])
def test_a_plan_is_what_the_schedule_gives_and_leaves_it_as_it_is(name: str, num_before: int):
    make, end = SCHEDULES[name]
    optimizer, scheduler = trained(make)
    for _ in range(num_before):
        optimizer.step()
        scheduler.step()
    before = copy.deepcopy((scheduler.state_dict(), optimizer.state_dict()))
    draws = random.getstate(), torch.get_rng_state()
    rates = preview_learning_rates(scheduler, num_unknown=20)
    assert (scheduler.state_dict(), optimizer.state_dict()) == before
    assert random.getstate() == draws[0]
    assert torch.equal(torch.get_rng_state(), draws[1])
    assert max(rates) == (20 if end is None else end - num_before)
    for call in range(max(rates) + 1):
        assert rates[call] == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9, abs=1e-12), call
        optimizer.step()
        scheduler.step()


def test_a_long_plan_is_thinned_and_one_that_must_be_followed_is_cut():
    _, scheduler = trained(lambda optimizer: schedules.OneCycleLR(optimizer, 0.5, total_steps=3_000_000))
    rates = preview_learning_rates(scheduler)
    assert len(rates) == 512
    assert max(rates) == 2_999_999
    _, scheduler = trained(lambda optimizer: schedules.MultiplicativeLR(optimizer, lambda step: 0.999))
    assert max(preview_learning_rates(scheduler, num_unknown=10**6)) == 2000


class Own(schedules.LRScheduler):
    def get_lr(self) -> Any:
        return [group["lr"] * random.random() for group in self.optimizer.param_groups]


calls: list[int] = []
noise = 0.5


def noted(step: int) -> float:
    calls.append(step)
    return 1.0


def noisy(step: int) -> float:
    return noise * random.random()


def counted(step: int) -> float:
    global noise
    noise = 0.5
    return noise


def test_what_does_not_follow_from_the_step_has_no_plan_and_is_not_called():
    makes: list[Any] = [
        schedules.ReduceLROnPlateau,
        Own,
        *(
            lambda optimizer, function=function: schedules.LambdaLR(optimizer, function)
            for function in (noted, noisy, counted)
        ),
        lambda optimizer: schedules.LambdaLR(optimizer, [warm, noted]),
    ]
    for make in makes:
        _, scheduler = trained(make)
        num_calls = len(calls)
        assert preview_learning_rates(scheduler, num_unknown=10) == {}
        assert len(calls) == num_calls


def closed_over(total: Any) -> Any:
    return lambda step: math.exp(-step / total)


@pytest.mark.parametrize(
    ("function", "is_so"),
    [
        (warm, True),
        (functools.partial(linear, num_warmup_steps=3, num_training_steps=40), True),
        (closed_over(100), True),
        (closed_over([1]), True),
        (lambda step: 0.5 ** (step // 30) if step > 5 else (1, 2)[step % 2], True),
        (lambda step: max(warm(step), abs(-0.1)), True),
        (closed_over(torch.ones(1)), False),
        (lambda step: print(step) or 1.0, False),
        (lambda step: calls.append(step) or 1.0, False),
        (lambda step: torch.rand(()).item(), False),
        (lambda step: noisy(step), False),
        (lambda step: len(vars()), False),
        (lambda step: missing(step), False),  # noqa: F821  # pyright: ignore
        (functools.partial(warm, calls), True),
        (functools.partial(warm, object()), False),
        (Own, False),
        (len, False),
    ],
)
def test_functions_of_the_step_are_distinguished_from_others(function: Any, is_so: bool):
    assert is_pure(function) is is_so


class Recorder:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)


def run(make: Any, *, each: str, num_epochs: int = 3, accumulate: int = 1, sink: Any = None) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = make(optimizer)
    loader = DataLoader(TensorDataset(torch.rand(24, 2)), batch_size=2, shuffle=True)
    accelerator = Accelerator(cpu=True, sink=sink, gradient_accumulation_steps=accumulate)
    accelerator.prepare(model, optimizer, scheduler, loader)
    for _ in range(num_epochs):
        for (x,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).square().mean())
                optimizer.step()
                if each == "step":
                    scheduler.step()
                optimizer.zero_grad()
        if each == "epoch":
            scheduler.step()
    weights = [value.detach().clone() for value in model.parameters()]
    accelerator.free_memory()
    return weights, accelerator


@pytest.mark.parametrize(
    ("make", "each", "accumulate"),
    [
        (lambda optimizer: schedules.OneCycleLR(optimizer, 0.5, total_steps=36), "step", 1),
        (lambda optimizer: schedules.LambdaLR(optimizer, warm), "step", 1),
        (lambda optimizer: schedules.CosineAnnealingLR(optimizer, 9), "step", 4),
        (lambda optimizer: schedules.StepLR(optimizer, 1, 0.5), "epoch", 1),
        (lambda optimizer: schedules.LinearLR(optimizer, total_iters=3), "epoch", 4),
    ],
)
def test_a_run_reports_its_plan_once_and_trains_the_same(make: Any, each: str, accumulate: int):
    sink = Recorder()
    weights, _ = run(make, each=each, accumulate=accumulate, sink=sink)
    plain, _ = run(make, each=each, accumulate=accumulate)
    assert all(torch.equal(value, other) for value, other in zip(weights, plain, strict=True))
    (plan,) = [event for event in sink.events if isinstance(event, LearningRatePlan)]
    given = {event.step: event.learning_rate for event in sink.events if isinstance(event, StepDone)}
    planned = dict(zip(plan.steps, plan.rates, strict=True))
    both = given.keys() & planned.keys()
    assert len(both) >= (9 if each == "step" else 4)
    assert {step: planned[step] for step in both} == pytest.approx({step: given[step] for step in both})
    assert from_message(to_message(plan)) == plan
    state = PanelState("run", 1)
    state.apply(sink.events)
    assert list(state.tables["plan", 0, "0"].columns[1]) == list(plan.rates)


def test_a_schedule_of_several_parts_prepared_with_them_has_one_plan():
    sink = Recorder()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = sequence(optimizer)
    accelerator = Accelerator(cpu=True, sink=sink)
    accelerator.prepare(model, optimizer, *scheduler._schedulers, scheduler)
    for cell in (1, 2):
        accelerator.begin_run()
        for _ in range(3):
            accelerator.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
            scheduler.step()
        plans = [event for event in sink.events if isinstance(event, LearningRatePlan)]
        assert len(plans) == cell, "each cell has a panel of its own"
    assert [plan.steps[0] for plan in plans] == [1, 1]
    assert plans[1].rates[0] == plans[0].rates[3]


def test_two_schedules_of_one_optimizer_have_no_plan():
    sink = Recorder()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    both = [schedules.ExponentialLR(optimizer, 0.9), schedules.StepLR(optimizer, 2)]
    accelerator = Accelerator(cpu=True, sink=sink)
    accelerator.prepare(model, optimizer, *both)
    for _ in range(3):
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        for scheduler in both:
            scheduler.step()
    assert not [event for event in sink.events if isinstance(event, LearningRatePlan)]


def test_a_forged_plan_is_dropped():
    state = PanelState("run", 1)
    plans = [
        LearningRatePlan(0, 1, 1.0, (1, 2), (0.1,)),
        LearningRatePlan(0, 1, 1.0, (2, 1), (0.1, 0.2)),
        LearningRatePlan(0, 1, 1.0, tuple(range(5000)), (0.1,) * 5000),
        *[LearningRatePlan(0, 1, 1.0, (1, 2), (0.1, 0.2))] * 10,
    ]
    state.apply(plans)
    assert len(state.tables) == 8
    assert state.num_dropped == 5
