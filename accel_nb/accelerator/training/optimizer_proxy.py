"""Gates: optimizers and schedulers whose steps wait for the end of an accumulation window, and agree between ranks.

Both stay the objects that they were. An optimizer gets two bound methods, since learning rate schedulers bind one of
their own in the same place; a scheduler gets a class made for it, since its state dict is its ``__dict__``.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.strategies.base import Bundle
from accel_nb.strategies.instance_patching import plain_class, restore, specialise


class Stepping(Protocol):
    """What an optimizer's gate asks whether and how to step."""

    is_replaying: bool

    def step(self, gate: OptimizerGate, closure: Callable[[], Any] | None) -> Any:
        """Step the gate's optimizer, or do not."""
        ...

    def may_zero(self, gate: OptimizerGate) -> bool:
        """Whether gradients may be cleared now."""
        ...

    def note_zero(self, gate: OptimizerGate) -> None:
        """Hear that gradients were cleared."""
        ...


class OptimizerGate:
    """Stands between one optimizer's ``step`` and ``zero_grad`` and those who call them."""

    def __init__(self, optimizer: Optimizer, stepping: Stepping) -> None:
        self.optimizer = optimizer
        self.num_attempts = 0
        self.num_ran = 0
        # Windows whose gradients were made ready, and that the optimizer stepped in.
        self.finished_in = -1
        self.stepped_in = -1
        # What the strategy is handed: the optimizer by itself.
        self.bundle = Bundle((), (optimizer,))
        # Parameters that belong to no prepared module; the number of groups they were found among.
        self.strays: Sequence[tuple[int, int, Tensor]] = ()
        self.num_checked = -1
        # No step of it has been looked at yet.
        self.is_unproven = True
        self._stepping = stepping
        self._is_inside = False
        self._closure: Callable[[], Any] | None = None
        self._result: Any = None
        self._saved = {name: vars(optimizer).get(name) for name in ("step", "zero_grad")}
        self._step = optimizer.step
        self._zero_grad = optimizer.zero_grad
        self._install_step()

    @property
    def is_replaying(self) -> bool:
        """Whether loops over epochs that a checkpoint holds as finished are passing by."""
        return self._stepping.is_replaying

    @property
    def is_open(self) -> bool:
        """Whether the optimizer is being stepped, or what a strategy steps in its place."""
        return self._is_inside

    @property
    def learning_rate(self) -> float:
        """The first group's learning rate; NaN where reading it would wait for the device."""
        rate = self.optimizer.param_groups[0].get("lr", math.nan)
        if type(rate) is float:
            return rate
        if isinstance(rate, Tensor):
            return rate.item() if rate.is_cpu else math.nan
        return float(rate)

    def run(self, step: Callable[[Optimizer], Any], closure: Callable[[], Any] | None = None) -> Any:
        """Call ``step`` with the gate open: the optimizer's own step runs when ``step`` comes to it."""
        self._is_inside, self._closure = True, closure
        try:
            return step(self.optimizer)
        finally:
            self._is_inside = False

    def step_plainly(self) -> bool:
        """Call the optimizer's own step; returns True, since it ran."""
        optimizer: Any = self.optimizer
        optimizer._opt_called = True  # what a scheduler looks at for its warning
        self._is_inside = True
        try:
            self._step()
        finally:
            self._is_inside = False
        return True

    def release(self) -> None:
        """Give the optimizer its own methods back."""
        for name in self._saved:
            self._put_back(name)

    def hold_zero_grad(self, is_held: bool) -> None:
        """Put a gate before ``zero_grad`` too, for windows of several micro-batches and hidden gradients."""
        optimizer: Any = self.optimizer
        if not is_held:
            self._put_back("zero_grad")
            return

        def zero_grad(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            if self._stepping.may_zero(self):
                self._zero_grad(*args, **kwargs)
                self._stepping.note_zero(self)

        optimizer.zero_grad = types.MethodType(zero_grad, optimizer)

    def _install_step(self) -> None:
        # A function, not a method of the gate: what is bound must be bound to the optimizer.
        def step(optimizer: Any, closure: Callable[[], Any] | None = None) -> Any:
            if not self._is_inside:
                return self._stepping.step(self, closure)
            optimizer._opt_called = True
            return self._step() if self._closure is None else self._step(self._closure)

        vars(step)["_wrapped_by_lr_sched"] = True  # else a later scheduler binds its own above
        optimizer: Any = self.optimizer
        optimizer.step = types.MethodType(step, optimizer)

    def _put_back(self, name: str) -> None:
        vars(self.optimizer).pop(name, None)
        if self._saved[name] is not None:
            setattr(self.optimizer, name, self._saved[name])


class Hearing(Protocol):
    """Hears of a schedule's steps as long as it waits for one."""

    is_waiting: bool

    def hear(self, scheduler: LRScheduler, stride: int, is_plain: bool) -> None:
        """Hear that a schedule is about to be stepped by ``stride``; ``is_plain`` says that it was given no epoch."""
        ...


def gate_scheduler(
    scheduler: LRScheduler, gate: OptimizerGate, stride: int = 1, hearing: Hearing | None = None
) -> LRScheduler:
    """Let ``scheduler.step`` do nothing where its optimizer was asked to step since the last call and did not.

    So a scheduler that is stepped for each batch counts optimizer steps, and one that is stepped for each epoch
    counts epochs; those that pass by empty after a resume are counted already. Each call advances the schedule by
    ``stride``, at most to the end of one that has an end.
    """
    own_step = type(scheduler).step
    seen_attempts, seen_ran = gate.num_attempts, gate.num_ran

    def step(self: LRScheduler, *args: Any, **kwargs: Any) -> Any:
        nonlocal seen_attempts, seen_ran
        is_held = gate.num_attempts > seen_attempts and gate.num_ran == seen_ran
        seen_attempts, seen_ran = gate.num_attempts, gate.num_ran
        if is_held or gate.is_replaying:
            return None
        if hearing is not None and hearing.is_waiting:
            hearing.hear(self, stride, not args and not kwargs)
        if stride > 1:
            _advance(self, own_step, stride - 1)
        return own_step(self, *args, **kwargs)

    return specialise(scheduler, {"step": step}, plain_class(scheduler))


def share_metric(scheduler: ReduceLROnPlateau, comm: Communicator) -> None:
    """Let ``scheduler.step`` take the mean of what all ranks have measured; every rank must call it.

    A loss that a loop has summed up is that of the rank's share: each by its own, ranks would lower the learning rate
    at different times and drift apart.
    """
    own_step = type(scheduler).step

    def step(self: ReduceLROnPlateau, metrics: Any, *args: Any, **kwargs: Any) -> None:
        measured = torch.tensor([float(metrics)], dtype=torch.float64, device=comm.world.device)
        own_step(self, comm.all_reduce(measured, "mean").item(), *args, **kwargs)

    specialise(scheduler, {"step": step})


def _advance(scheduler: LRScheduler, own_step: Callable[..., Any], count: int) -> None:
    """Advance a schedule without its optimizer; at once where the rate is a function of the position alone."""
    total = getattr(scheduler, "total_steps", None)
    if total is not None:
        count = max(0, min(count, total - 2 - scheduler.last_epoch))
    if isinstance(scheduler, LambdaLR):
        scheduler.last_epoch += count
        return
    for _ in range(count):
        own_step(scheduler)


def release_scheduler(scheduler: LRScheduler) -> LRScheduler:
    """Undo `gate_scheduler`."""
    return restore(scheduler)
