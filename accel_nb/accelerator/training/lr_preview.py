"""Preview of a schedule's future learning rates, computed once on a copy and reported for the panel.

It is reported only for schedules of torch whose rates depend on the number of steps alone.
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

from accel_nb.accelerator.training.pure_function import is_pure
from accel_nb.accelerator.training.stepper import Stepper
from accel_nb.runtime.tensors.instance_patching import innermost_class
from accel_nb.telemetry.events import EventSink, LearningRatePlan

logger = logging.getLogger(__name__)

MAX_POINTS = 512
MAX_ITERATED = 2000
"""Number of calls that are previewed for a schedule that computes each rate from the previous one."""
EPOCHS_AHEAD = 10
"""Number of epochs that are previewed for a schedule without an end that is stepped each epoch."""

_DIRECT = (
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
"""Schedules whose rate at any position can be computed directly."""
_ITERATIVE = (schedules.MultiplicativeLR, schedules.CosineAnnealingWarmRestarts)


class RatePreview:
    """Reports a `LearningRatePlan` once in a run, as soon as the interval between steps of the schedule is known.

    It is known at the first call if one step, or one epoch, was made before; otherwise at the second call. Runs on
    rank 0 only.
    """

    def __init__(
        self, sink: EventSink, rank: int, stepper: Stepper, epoch_lengths: Callable[[], Iterable[int]]
    ) -> None:
        """Begin without a preview; ``epoch_lengths`` returns the number of batches of each prepared loader."""
        self._epoch_lengths = epoch_lengths
        self._sink = sink
        self._rank = rank
        self._stepper = stepper
        self.begin_run()

    def begin_run(self) -> None:
        """Reset for a new cell, whose panel has no preview."""
        # Whether nothing was reported yet: the only flag that each step of a schedule tests.
        self.is_waiting = True
        self._seen_step = self._stepper.meter.step
        self._num_calls = 0

    def on_step(self, scheduler: LRScheduler, stride: int, is_plain: bool) -> None:
        """Report the future rates of a schedule that is about to advance by ``stride``, if they can be computed.

        ``is_plain``: the schedule's step got no arguments, such as an epoch.
        """
        bundle = self._stepper.bundle
        parts = {id(part) for prepared in bundle.schedulers for part in _parts(prepared)}
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
            steps for length in self._epoch_lengths() for steps in (length // window, math.ceil(length / window))
        }
        self._num_calls += 1
        if self._num_calls == 1 and num_steps > 1 and num_steps not in lengths:
            self._seen_step = step  # possibly within an epoch: the interval is measured at the next call
            return
        self.is_waiting = False
        num_unknown = max(lengths, default=None) if num_steps == 1 else EPOCHS_AHEAD
        try:
            rates = preview_learning_rates(scheduler, stride=stride, num_unknown=num_unknown)
        except Exception:  # a schedule of another version of torch; training continues
            logger.debug("the schedule's future rates cannot be computed", exc_info=True)
            return
        if rates:
            number = self._stepper.meter.run_step
            steps, values = _over_steps(rates, number, num_steps)
            self._sink.emit(LearningRatePlan(self._rank, number, time.time(), steps, values))


def preview_learning_rates(
    scheduler: LRScheduler, *, stride: int = 1, num_unknown: int | None = None, max_points: int = MAX_POINTS
) -> dict[int, float]:
    """Return the first group's rate by the number of further calls, from 0 to the schedule's end.

    At most ``max_points`` evenly spaced numbers of calls are returned. The rates of a schedule without an end, or past
    its end, are computed for ``num_unknown`` calls; with None they are not computed. Empty for a schedule whose rates
    do not depend on the number of calls alone. The scheduler and its optimizer are not changed.
    """
    rates = [group.get("lr") for group in scheduler.optimizer.param_groups]
    if not _is_determined(scheduler) or any(isinstance(rate, Tensor) and not rate.is_cpu for rate in rates):
        return {}
    position = max(getattr(part, "last_epoch", 0) for part in (scheduler, *_parts(scheduler)))
    end = _own_end(scheduler)
    num_calls = math.ceil((end - position) / stride) if end is not None and end > position else num_unknown or 0
    if num_calls <= 0:
        return {}
    copied = _copy_of(scheduler)
    total = getattr(scheduler, "total_steps", None)
    if not _is_direct(scheduler):
        num_calls = min(num_calls, MAX_ITERATED // stride)
    chosen = _chosen_calls(num_calls, max_points)
    with torch.no_grad():
        if _is_direct(scheduler):
            last = math.inf if total is None else total - 1
            return {call: _rate_at(copied, int(min(position + call * stride, last))) for call in chosen}
        return dict(_iterated(copied, chosen, stride))


def _over_steps(rates: Mapping[int, float], step: int, num_steps: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return steps and their rates, if a call of the schedule follows every ``num_steps`` steps."""
    points: list[tuple[int, float]] = []
    for call, rate in rates.items():
        last = step + call * num_steps
        points += [(last - num_steps + 1, rate)] * (num_steps > 1) + [(last, rate)]
    return tuple(last for last, _ in points), tuple(rate for _, rate in points)


def _is_determined(scheduler: LRScheduler) -> bool:
    kind = innermost_class(scheduler)
    if kind in (schedules.SequentialLR, schedules.ChainedScheduler):
        return all(map(_is_determined, vars(scheduler)["_schedulers"]))
    functions = [*vars(scheduler).get("lr_lambdas", ()), vars(scheduler).get("_scale_fn_custom")]
    is_known = kind in (*_DIRECT, *_ITERATIVE)
    return is_known and all(item is None or is_pure(item) for item in functions)


def _is_direct(scheduler: LRScheduler) -> bool:
    kind = innermost_class(scheduler)
    if kind is schedules.SequentialLR:
        return all(map(_is_direct, vars(scheduler)["_schedulers"]))
    return kind in _DIRECT


def _own_end(scheduler: Any) -> int | None:
    """Return the position after which a schedule's rate stays constant; None for one without an end."""
    match innermost_class(scheduler):
        case schedules.SequentialLR:
            *_, last = [0, *scheduler._milestones]
            return last + (_own_end(scheduler._schedulers[-1]) or 0)
        case schedules.ChainedScheduler:
            return max((end for part in scheduler._schedulers if (end := _own_end(part)) is not None), default=None)
        case schedules.LambdaLR:
            ends = [getattr(item, "keywords", {}).get("num_training_steps") for item in scheduler.lr_lambdas]
            return max((end for end in ends if isinstance(end, int)), default=None)
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


class _FakeOptimizer:
    """Replaces the optimizer of a copied schedule: has copies of its groups, without parameters."""

    _opt_called = True

    def __init__(self, groups: Sequence[Mapping[str, Any]]) -> None:
        kept = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        self.param_groups = copy.deepcopy(kept)

    def step(self) -> None:
        """Do nothing."""

    vars(step)["_wrapped_by_lr_sched"] = True


def _copy_of(scheduler: LRScheduler) -> Any:
    """Return a deep copy of a scheduler that steps no optimizer."""
    fake = _FakeOptimizer(scheduler.optimizer.param_groups)
    copied = copy.deepcopy(scheduler, {id(scheduler.optimizer): fake})
    for part in (copied, *_parts(copied)):
        part._get_lr_called_within_step = True  # get_lr() warns unless it is called within step()
    return copied


def _rate_at(copied: Any, position: int) -> float:
    if innermost_class(copied) is schedules.SequentialLR:
        index = bisect_right(copied._milestones, position)
        return _rate_at(copied._schedulers[index], position - (copied._milestones[index - 1] if index else 0))
    copied.last_epoch = position
    compute = getattr(copied, "_get_closed_form_lr", copied.get_lr)
    return float(compute()[0])


def _iterated(copied: Any, calls: Sequence[int], stride: int) -> Iterator[tuple[int, float]]:
    chosen = set(calls)
    for call in range(calls[-1] + 1):
        if call in chosen:
            yield call, float(copied.optimizer.param_groups[0]["lr"])
        for _ in range(stride):
            copied.step()


def _chosen_calls(num_calls: int, max_points: int) -> list[int]:
    if num_calls < max_points:
        return list(range(num_calls + 1))
    return sorted({round(index * num_calls / (max_points - 1)) for index in range(max_points)})


def _parts(scheduler: Any) -> Iterator[LRScheduler]:
    """Yield the schedules that a schedule combines, at any depth."""
    for part in vars(scheduler).get("_schedulers", ()):
        yield part
        yield from _parts(part)
