"""Optimizers and schedulers that step only where an accumulation window ends, on all ranks alike.

The user's objects are patched in place and not wrapped. An optimizer gets instance attributes ``step`` and
``zero_grad``, in the way in which torch's schedulers patch ``step``. A scheduler gets a subclass that is made for it:
attributes would become part of its state dict, which is its ``__dict__``.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from accel_nb.accelerator.training.unaveraged import UnaveragedParameter
from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.runtime.tensors.instance_patching import patch_instance, plain_class, unpatch_instance
from accel_nb.strategies.base import Bundle


class StepHandler(Protocol):
    """Decides for an `OptimizerProxy` whether and how its optimizer steps."""

    is_replaying: bool

    def step(self, proxy: OptimizerProxy, closure: Callable[[], Any] | None) -> Any:
        """Step the optimizer of a proxy where the accumulation window closes."""
        ...

    def run_step(self, optimizer: Optimizer, step: Callable[[], Any], *, has_closure: bool) -> Any:
        """Call ``step``, the original method of an optimizer.

        ``has_closure``: with a closure that computes gradients.
        """
        ...

    def may_zero_grad(self, proxy: OptimizerProxy) -> bool:
        """Return whether the optimizer may clear its gradients now, as no accumulation window is open."""
        ...

    def handle_zero_grad(self, proxy: OptimizerProxy, *, drops: bool) -> None:
        """Drop the gradients outside of ``parameter.grad`` too, or set them to zero.

        Called after the optimizer has cleared its own.
        """
        ...


class OptimizerProxy:
    """Intercepts ``step`` and ``zero_grad`` of one optimizer."""

    def __init__(self, optimizer: Optimizer, stepping: StepHandler) -> None:
        self.optimizer = optimizer
        self.num_step_calls = 0
        self.num_steps_run = 0
        self.was_skipped = False
        # Numbers of the last window whose gradients were averaged, and of the last one in which the optimizer stepped.
        self.finished_window = -1
        self.stepped_window = -1
        # The argument for calls of the strategy: the prepared models and this optimizer alone.
        self.bundle = Bundle((), (optimizer,))
        # Parameters of no prepared model, and how many groups were searched for them.
        self.unaveraged: Sequence[UnaveragedParameter] = ()
        self.num_groups_checked = -1
        # Whether the first step is still to be checked.
        self.needs_check = True
        self._stepping = stepping
        self._is_stepping = False
        self._closure: Callable[[], Any] | None = None
        # The arguments of the cell's ``step``, and the result of the optimizer's own method; None if it did not run.
        self._arguments: tuple[tuple[Any, ...], dict[str, Any]] = (), {}
        self.result: Any = None
        self._saved = {name: vars(optimizer).get(name) for name in ("step", "zero_grad")}
        self._step = optimizer.step
        self._zero_grad = optimizer.zero_grad
        self._install_step()

    @property
    def is_replaying(self) -> bool:
        """Whether loops run over epochs that a loaded checkpoint has finished."""
        return self._stepping.is_replaying

    @property
    def is_stepping(self) -> bool:
        """Whether a step of the optimizer, or of one that a strategy uses in its place, is running."""
        return self._is_stepping

    @property
    def learning_rate(self) -> float:
        """The first group's learning rate; NaN for a tensor on a device, since reading it would wait for the device."""
        rate = self.optimizer.param_groups[0].get("lr", math.nan)
        if type(rate) is float:
            return rate
        if isinstance(rate, Tensor):
            return rate.item() if rate.is_cpu else math.nan
        return float(rate)

    def run(self, step: Callable[[Optimizer], Any], closure: Callable[[], Any] | None = None) -> Any:
        """Call ``step``, inside of which the optimizer's ``step`` method runs the original one."""
        names = vars(self.optimizer)
        replaced = names["step"]  # code that counts steps may have replaced the method, and has been called by now
        try:
            self._is_stepping, self._closure = True, closure
            self._install_step()
            return step(self.optimizer)
        finally:
            self._is_stepping, self._closure = False, None
            names["step"] = replaced

    def step_directly(self) -> bool:
        """Call the optimizer's original step; return True, since it ran."""
        optimizer: Any = self.optimizer
        optimizer._opt_called = True  # read by schedulers for the warning about the order of calls
        try:
            self._is_stepping = True
            self._run_step()
        finally:
            self._is_stepping = False
        return True

    def step_alone(self) -> Any:
        """Call the optimizer's own step with the cell's arguments, on this rank alone; return its result."""
        args, kwargs = self._arguments
        return self._step(*args, **kwargs)

    def restore(self) -> None:
        """Restore the optimizer's original methods."""
        for name in self._saved:
            self._restore(name)

    def defer_zero_grad(self, is_deferred: bool) -> None:
        """Intercept ``zero_grad``, or stop that; needed for windows of several micro-batches and hidden gradients."""
        if not is_deferred:
            self._restore("zero_grad")
            return

        def zero_grad(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            if self._stepping.may_zero_grad(self):
                self._zero_grad(*args, **kwargs)
                drops = kwargs.get("set_to_none", args[0] if args else True)
                self._stepping.handle_zero_grad(self, drops=bool(drops))

        self._install("zero_grad", zero_grad)

    def _install_step(self) -> None:
        # A function and not a method of the proxy, since it is bound to the optimizer.
        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._is_stepping:
                self._arguments, self.result = (args, kwargs), None
                return self._stepping.step(self, _closure_in(args, kwargs))
            optimizer._opt_called = True
            return self._run_step()

        vars(step)["_wrapped_by_lr_sched"] = True  # else a scheduler that is made later patches step again
        self._install("step", step)

    def _run_step(self) -> Any:
        """Call the optimizer's own step with the cell's arguments; return its result."""
        args, kwargs = self._arguments
        if self._closure is not None:
            own, self_closure = _closure_in(args, kwargs), self._closure
            args = tuple(self_closure if item is own else item for item in args)
            kwargs = {name: self_closure if item is own else item for name, item in kwargs.items()}
        own_step = functools.partial(self._step, *args, **kwargs)
        self.result = self._stepping.run_step(self.optimizer, own_step, has_closure=self._closure is not None)
        return self.result

    def _install(self, name: str, method: Callable[..., Any]) -> None:
        # An optimizer is sent to other processes with the user's method. Torch's `GradScaler` reads the signature.
        vars(method)["__wrapped__"] = self._saved[name] or getattr(type(self.optimizer), name)
        setattr(self.optimizer, name, types.MethodType(method, self.optimizer))

    def _restore(self, name: str) -> None:
        vars(self.optimizer).pop(name, None)
        if self._saved[name] is not None:
            setattr(self.optimizer, name, self._saved[name])


def _closure_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """Return the closure among the arguments of an optimizer's ``step``; a user's class may have other parameters."""
    first = args[0] if args else kwargs.get("closure")
    return first if callable(first) else None


class ScheduleObserver(Protocol):
    """Observer that is called before a schedule steps, if ``is_waiting``."""

    is_waiting: bool

    def on_step(self, scheduler: LRScheduler, stride: int, is_plain: bool) -> None:
        """React to a schedule that is about to advance by ``stride``; ``is_plain``: its step got no arguments."""
        ...


def wrap_scheduler(
    scheduler: LRScheduler, proxy: OptimizerProxy, stride: int = 1, observer: ScheduleObserver | None = None
) -> LRScheduler:
    """Make ``scheduler.step`` do nothing if the optimizer's step was called since the last call and did not run.

    So a scheduler that is stepped for each batch counts optimizer steps, and one that is stepped for each epoch counts
    epochs. In epochs that are replayed after a resume it does nothing, since the restored state includes them. Each
    call advances the schedule by ``stride``, at most to its end.
    """
    own_step = type(scheduler).step
    seen_attempts, seen_ran = proxy.num_step_calls, proxy.num_steps_run

    def step(self: LRScheduler, *args: Any, **kwargs: Any) -> Any:
        nonlocal seen_attempts, seen_ran
        is_held = proxy.num_step_calls > seen_attempts and proxy.num_steps_run == seen_ran
        seen_attempts, seen_ran = proxy.num_step_calls, proxy.num_steps_run
        if is_held or proxy.is_replaying:
            return None
        if observer is not None and observer.is_waiting:
            observer.on_step(self, stride, not args and not kwargs)
        if stride > 1:
            _advance(self, own_step, stride - 1)
        return own_step(self, *args, **kwargs)

    return patch_instance(scheduler, {"step": step}, plain_class(scheduler))


def average_metric(scheduler: ReduceLROnPlateau, comm: Communicator, check: Callable[[], None]) -> None:
    """Make ``scheduler.step`` use the mean of all ranks' metrics; every rank must call it.

    ``check`` raises where some ranks do not. A loss that a loop has summed up covers this rank's share only. Without
    the mean, ranks would lower the learning rate at different times, and their replicas would diverge.
    """
    own_step = type(scheduler).step

    def step(self: ReduceLROnPlateau, metrics: Any, *args: Any, **kwargs: Any) -> None:
        check()
        measured = torch.tensor([float(metrics)], dtype=torch.float64, device=comm.world.device)
        own_step(self, comm.all_reduce(measured, "mean").item(), *args, **kwargs)

    patch_instance(scheduler, {"step": step})


def _advance(scheduler: LRScheduler, own_step: Callable[..., Any], count: int) -> None:
    """Advance a schedule without a step of its optimizer, directly if the rate depends on the position alone."""
    total = getattr(scheduler, "total_steps", None)
    if total is not None:
        count = max(0, min(count, total - 2 - scheduler.last_epoch))
    if isinstance(scheduler, LambdaLR):
        scheduler.last_epoch += count
        return
    for _ in range(count):
        own_step(scheduler)


def unwrap_scheduler(scheduler: LRScheduler) -> LRScheduler:
    """Undo `wrap_scheduler`."""
    return unpatch_instance(scheduler)
