"""Changes of a running training's learning rates, together with their schedules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

_GROUP_KEYS = ("lr", "initial_lr", "max_lr", "swa_lr")
_SCHEDULER_ATTRIBUTES = ("base_lrs", "max_lrs", "_last_lr")


def first_learning_rate(optimizers: Iterable[Optimizer]) -> float | None:
    """Return the first group's learning rate, which the panel shows; None without groups."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if "lr" in group:
                return float(group["lr"])
    return None


def scale_learning_rates(optimizers: Iterable[Optimizer], schedulers: Iterable[LRScheduler], factor: float) -> None:
    """Multiply every group's rate, and the base and maximum rates of each schedule, by ``factor``.

    The later rates of a schedule are then its original ones times the factor, whether it computes them from its base
    rate or from the previous rate. Its minimum rates (``eta_min``, ``min_lr``) are not changed. A tensor is multiplied
    in place, and once if several groups share it.
    """
    seen: set[int] = set()

    def scaled(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value * factor
        if id(value) not in seen:
            seen.add(id(value))
            value.mul_(factor)
        return value

    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for name in _GROUP_KEYS:
                if name in group:
                    group[name] = scaled(group[name])
    for scheduler in _all_of(schedulers):
        for name in _SCHEDULER_ATTRIBUTES:
            values = vars(scheduler).get(name)
            if isinstance(values, list):
                setattr(scheduler, name, list(map(scaled, values)))


def set_learning_rates(optimizers: Iterable[Optimizer], value: float) -> None:
    """Set every group's rate, for rates of zero, which cannot be scaled."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"].fill_(value) if isinstance(group.get("lr"), Tensor) else value


def _all_of(schedulers: Iterable[LRScheduler]) -> Iterator[LRScheduler]:
    """Yield schedulers and the schedulers that they combine, each once."""
    seen: set[int] = set()
    stack = list(schedulers)
    while stack:
        scheduler = stack.pop()
        if id(scheduler) not in seen:
            seen.add(id(scheduler))
            stack += vars(scheduler).get("_schedulers", ())
            yield scheduler
