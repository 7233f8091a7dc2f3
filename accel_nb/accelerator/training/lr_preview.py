"""The learning rate that a schedule is going to give: computed once, on a copy, and reported beside what it gives.

Only for schedules of torch whose future follows from how often they are stepped; of others nothing is reported.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import lr_scheduler as schedules
from torch.optim.lr_scheduler import LRScheduler

from accel_nb.accelerator.training.pure_function import follows_from_arguments
from accel_nb.accelerator.training.stepper import Stepper
from accel_nb.strategies.instance_patching import innermost_class
from accel_nb.telemetry.events import RatePlanned, Sink

logger = logging.getLogger(__name__)

MAX_POINTS = 512
MAX_ITERATED = 2000
"""So far ahead is looked where a rate follows from the one before only."""
EPOCHS_AHEAD = 10
"""So far ahead is looked of a schedule without an end that is stepped each epoch."""

_AT_ONCE = (
    schedules.LambdaLR,
    schedules.StepLR,
    schedules.MultiStepLR,
    schedules.ConstantLR,
    schedules.LinearLR,
    schedules.ExponentialLR,
    schedules.PolynomialLR,
    schedules.CosineAnnealingLR,
    schedules.OneCycleLR,
    schedules.CyclicLR,
)
"""The rate at any position can be computed by itself."""
_ONE_BY_ONE = (schedules.MultiplicativeLR, schedules.CosineAnnealingWarmRestarts)


class RatePlanner:
    """Reports a `RatePlanned` at a run's first call of a schedule whose spacing can be told; main rank only.

    A call that ends one step, or one epoch, tells it; of other calls the second does.
    """

    def __init__(self, sink: Sink, rank: int, stepper: Stepper) -> None:
        # How many batches each prepared loader has.
        self.epoch_lengths: Callable[[], Iterable[int]] = tuple
        self._sink = sink
        self._rank = rank
        self._stepper = stepper
        self.begin_run()

    def begin_run(self) -> None:
        """Hear that a cell begins, whose panel knows no plan."""
        # All that a schedule's step looks at.
        self.is_waiting = True
        self._seen_step = self._stepper.meter.step
        self._num_calls = 0

    def hear(self, scheduler: LRScheduler, stride: int, is_plain: bool) -> None:
        """Hear that a schedule is about to be stepped by ``stride``; ``is_plain`` says that it was given no epoch."""
        bundle = self._stepper.bundle
        parts = {id(part) for known in bundle.schedulers for part in _parts(known)}
        if id(scheduler) in parts:
            return
        if not bundle.optimizers or scheduler.optimizer is not bundle.optimizers[0]:
            return  # the panel shows the first one's rate
        roots = [item for item in bundle.schedulers if id(item) not in parts and item.optimizer is scheduler.optimizer]
        step = self._stepper.meter.step
        num_steps = step - self._seen_step
        if num_steps <= 0:
            return
        if not is_plain or len(roots) > 1:
            self.is_waiting = False
            return
        window = self._stepper.window.size
        lengths = {
            around for length in self.epoch_lengths() for around in (length // window, math.ceil(length / window))
        }
        self._num_calls += 1
        if self._num_calls == 1 and num_steps > 1 and num_steps not in lengths:
            self._seen_step = step  # the middle of an epoch, or every so many steps: the next call tells
            return
        self.is_waiting = False
        num_unknown = max(lengths, default=None) if num_steps == 1 else EPOCHS_AHEAD
        try:
            rates = planned_rates(scheduler, stride=stride, num_unknown=num_unknown)
        except Exception:  # a schedule of another version of torch; the training goes on
            logger.debug("the schedule's future is not known", exc_info=True)
            return
        if rates:
            steps, values = _over_steps(rates, step, num_steps)
            self._sink.emit(RatePlanned(self._rank, step, time.time(), steps, values))


def planned_rates(
    scheduler: LRScheduler, *, stride: int = 1, num_unknown: int | None = None, max_points: int = MAX_POINTS
) -> dict[int, float]:
    """Return the first group's rate after so many further calls, from 0 to the schedule's own end, evenly thinned.

    A schedule without an end, or past it, is followed for ``num_unknown`` calls; None follows it not at all. Empty for
    one whose future does not follow from the number of calls. The scheduler and its optimizer stay as they are.
    """
    rates = [group.get("lr") for group in scheduler.optimizer.param_groups]
    if not _is_determined(scheduler) or any(isinstance(rate, Tensor) and not rate.is_cpu for rate in rates):
        return {}
    position = max(getattr(part, "last_epoch", 0) for part in (scheduler, *_parts(scheduler)))
    end = _own_end(scheduler)
    num_calls = math.ceil((end - position) / stride) if end is not None and end > position else num_unknown or 0
    if num_calls <= 0:
        return {}
    twin = _twin(scheduler)
    total = getattr(scheduler, "total_steps", None)
    if not _is_at_once(scheduler):
        num_calls = min(num_calls, MAX_ITERATED // stride)
    places = _places(num_calls, max_points)
    with torch.no_grad():
        if _is_at_once(scheduler):
            last = math.inf if total is None else total - 1
            return {place: _rate_at(twin, int(min(position + place * stride, last))) for place in places}
        return dict(_iterated(twin, places, stride))


def _over_steps(rates: Mapping[int, float], step: int, num_steps: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return steps and rates: each call of a schedule decides on the ``num_steps`` steps that follow it."""
    points: list[tuple[int, float]] = []
    for call, rate in rates.items():
        last = step + call * num_steps
        points += [(last - num_steps + 1, rate)] * (num_steps > 1) + [(last, rate)]
    return tuple(place for place, _ in points), tuple(rate for _, rate in points)


def _is_determined(scheduler: LRScheduler) -> bool:
    kind = innermost_class(scheduler)
    if kind in (schedules.SequentialLR, schedules.ChainedScheduler):
        return all(map(_is_determined, vars(scheduler)["_schedulers"]))
    functions = [*vars(scheduler).get("lr_lambdas", ()), vars(scheduler).get("_scale_fn_custom")]
    is_known = kind in (*_AT_ONCE, *_ONE_BY_ONE)
    return is_known and all(item is None or follows_from_arguments(item) for item in functions)


def _is_at_once(scheduler: LRScheduler) -> bool:
    kind = innermost_class(scheduler)
    if kind is schedules.SequentialLR:
        return all(map(_is_at_once, vars(scheduler)["_schedulers"]))
    return kind in _AT_ONCE


def _own_end(scheduler: Any) -> int | None:
    """Return the position at which a schedule has done all that it was told; None for one that has no end."""
    match innermost_class(scheduler):
        case schedules.SequentialLR:
            *_, last = [0, *scheduler._milestones]
            return last + (_own_end(scheduler._schedulers[-1]) or 0)
        case schedules.ChainedScheduler:
            return max((end for part in scheduler._schedulers if (end := _own_end(part)) is not None), default=None)
        case schedules.LambdaLR:
            told = [getattr(item, "keywords", {}).get("num_training_steps") for item in scheduler.lr_lambdas]
            return max((end for end in told if isinstance(end, int)), default=None)
        case schedules.MultiStepLR:
            return max(scheduler.milestones, default=None)
        case schedules.OneCycleLR:
            return scheduler.total_steps - 1
        case schedules.CosineAnnealingLR:
            return math.ceil(scheduler.T_max)
        case schedules.CosineAnnealingWarmRestarts:
            return math.ceil(scheduler.last_epoch + scheduler.T_i - scheduler.T_cur)
        case schedules.CyclicLR:
            return math.ceil(scheduler.total_size)
        case schedules.ConstantLR | schedules.LinearLR | schedules.PolynomialLR:
            return scheduler.total_iters
        case _:
            return None


class _StandIn:
    """What a schedule needs of an optimizer: its groups, without parameters."""

    _opt_called = True

    def __init__(self, groups: Sequence[Mapping[str, Any]]) -> None:
        kept = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        self.param_groups = copy.deepcopy(kept)

    def step(self) -> None:
        """Step nothing."""

    vars(step)["_wrapped_by_lr_sched"] = True


def _twin(scheduler: LRScheduler) -> Any:
    """Return a copy of a scheduler, of its own class, that has nothing in common with it and steps no optimizer."""
    stand_in = _StandIn(scheduler.optimizer.param_groups)
    twin = copy.deepcopy(scheduler, {id(scheduler.optimizer): stand_in})
    for part in (twin, *_parts(twin)):
        part._get_lr_called_within_step = True  # it is asked for its rates as its own step would
    return twin


def _rate_at(twin: Any, position: int) -> float:
    if innermost_class(twin) is schedules.SequentialLR:
        index = bisect_right(twin._milestones, position)
        return _rate_at(twin._schedulers[index], position - (twin._milestones[index - 1] if index else 0))
    twin.last_epoch = position
    compute = getattr(twin, "_get_closed_form_lr", twin.get_lr)
    return float(compute()[0])


def _iterated(twin: Any, places: Sequence[int], stride: int) -> Iterator[tuple[int, float]]:
    wanted = set(places)
    for call in range(places[-1] + 1):
        if call in wanted:
            yield call, float(twin.optimizer.param_groups[0]["lr"])
        for _ in range(stride):
            twin.step()


def _places(num_calls: int, max_points: int) -> list[int]:
    if num_calls < max_points:
        return list(range(num_calls + 1))
    return sorted({round(index * num_calls / (max_points - 1)) for index in range(max_points)})


def _parts(scheduler: Any) -> Iterator[LRScheduler]:
    """Yield the schedules that a schedule is made of."""
    for part in vars(scheduler).get("_schedulers", ()):
        yield part
        yield from _parts(part)
