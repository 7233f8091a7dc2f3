"""Control of a running training: requested actions run after the same step on every rank.

Ranks exchange no messages for this. Each rank counts the steps after which its loop reads a next batch. When the user
requests an action, the kernel proposes it to every rank: the rank's monitor thread returns this count, and its main
thread waits at the end of its next step. The kernel then sets the count at which all ranks run the action: one above
the highest count, so that no rank is past it. Without a request a step only tests a flag in memory.
"""

from __future__ import annotations

import reprlib
import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from accel_nb.accelerator.training.autosave import Autosave
from accel_nb.accelerator.training.lr_control import first_learning_rate, scale_learning_rates, set_learning_rates
from accel_nb.accelerator.training.stepper import Stepper
from accel_nb.errors import CheckpointError
from accel_nb.telemetry.actions import (
    IS_BEING_SAVED,
    Action,
    Inspect,
    SaveNow,
    ScaleLearningRate,
    SetLearningRate,
    SetReportInterval,
    StopAfterStep,
    TakeMemorySnapshot,
)
from accel_nb.telemetry.step_meter import StepMeter

NO_MEMORY_SNAPSHOT = "no memory snapshot: the device has no caching allocator"


class TrainingStopped(KeyboardInterrupt):
    """Raised after the step at which a requested stop takes effect. A cell that it ends counts as finished."""


@dataclass(slots=True)
class DueAction:
    """An action that all ranks run when their count of steps is ``due_count``."""

    due_count: int
    number: int
    action: Action


class ControlReceiver:
    """The actions requested of one rank. `propose` and `decide` run in the monitor thread, the rest in the main one."""

    def __init__(
        self,
        report: Callable[[int, int, str], object],
        describe_name: Callable[[str], str],
        report_memory_snapshot: Callable[[int], str] = lambda step: NO_MEMORY_SNAPSHOT,
        report_interrupt: Callable[[], object] = lambda: None,
    ) -> None:
        """Create a receiver without actions.

        ``report`` is called with an action's number, the step and the outcome. ``describe_name`` returns a description
        of a variable. ``report_memory_snapshot`` reports a snapshot of memory after a step and returns the outcome.
        ``report_interrupt`` is called before an interrupt is raised at the end of a step.
        """
        self.report_interrupt = report_interrupt
        self._report = report
        self._describe_name = describe_name
        self._report_memory_snapshot = report_memory_snapshot
        self._changed = threading.Condition()
        self.begin_run()

    def begin_run(self) -> None:
        """Discard the actions of the previous run."""
        self.count = 0
        # The only flag that is tested after each step.
        self.is_pending = False
        self._proposed: tuple[int, Action] | None = None
        self._due: list[DueAction] = []
        self.stopped_step: int | None = None

    def propose(self, number: int, action: Action) -> int:
        """Make this rank wait at the end of its next step, and return how many steps it has counted."""
        with self._changed:
            self._proposed = number, action
            self.is_pending = True  # before the count is read: it then includes every step that ignored the flag
            return self.count

    def decide(self, number: int, at: int | None) -> None:
        """Set the count of steps at which all ranks run the proposed action; None cancels it."""
        with self._changed:
            if self._proposed is None or self._proposed[0] != number:
                return
            action, self._proposed = self._proposed[1], None
            if at is not None:
                self._due.append(DueAction(at, number, action))
            self.is_pending = bool(self._due)
            self._changed.notify_all()

    def run_due_actions(self, controller: RunController) -> None:
        """Wait for the count of a proposed action, then run due actions; raises `TrainingStopped` to stop the run."""
        with self._changed:
            while self._proposed is not None:
                self._changed.wait()
            due = [item for item in self._due if item.due_count <= self.count]
            self._due = [item for item in self._due if item.due_count > self.count]
            self.is_pending = bool(self._due)
        step = controller.num_steps
        for item in sorted(due, key=lambda item: isinstance(item.action, StopAfterStep)):
            self._report(item.number, step, self._do(item.action, controller))
        if any(isinstance(item.action, StopAfterStep) for item in due):
            self.stopped_step = step
            raise TrainingStopped

    def _do(self, action: Action, controller: RunController) -> str:
        if isinstance(action, Inspect):
            return "\n".join(f"{name} = {_text_or_problem(self._describe_name, name)}" for name in action.names)
        if isinstance(action, TakeMemorySnapshot):
            return _text_or_problem(self._report_memory_snapshot, controller.num_steps)
        return controller.run_action(action)


def _text_or_problem(describe: Callable[[Any], str], subject: Any) -> str:
    try:
        return describe(subject)
    except Exception as error:  # a failure to read values must not end the training
        return f"not available: {type(error).__name__}: {error}"


@dataclass(slots=True)
class RunController:
    """Runs requested actions on the prepared objects of one accelerator, without a reference to the accelerator."""

    receiver: ControlReceiver
    stepper: Stepper
    meter: StepMeter
    autosave: Autosave | None = None
    _seen_step: int = 0

    @property
    def num_steps(self) -> int:
        """The number of optimizer steps of the run."""
        return self.meter.run_step

    def on_batch_end(self) -> None:
        """Count a step, and run due actions, when a loop has finished a batch; this is on the hot path.

        A batch inside of an accumulation window, or one that trains nothing, ends no step. Inside of
        join_uneven_inputs nothing is counted, since ranks have different numbers of batches there.
        """
        step = self.meter.step
        if step == self._seen_step or self.stepper.is_joined:
            return
        self._seen_step = step
        receiver = self.receiver
        receiver.count += 1
        if receiver.is_pending:
            receiver.run_due_actions(self)

    def begin_run(self) -> None:
        """Reset for a new cell, which reports every step again."""
        self._seen_step = self.meter.step
        self.meter.interval = 1

    def run_action(self, action: Action) -> str:
        """Run an action between two steps and return a description of the outcome."""
        if isinstance(action, StopAfterStep):
            return f"stopped after step {self.num_steps:,}" + ("" if self.autosave is None else f": {self._save()}")
        if isinstance(action, SaveNow):
            return self._save()
        if isinstance(action, SetReportInterval):
            self.meter.interval = action.steps
            return "every step is reported" if action.steps == 1 else f"every {action.steps:,} steps are reported"
        assert isinstance(action, ScaleLearningRate | SetLearningRate)
        return self._change_learning_rate(action)

    def _save(self) -> str:
        if self.autosave is None:
            return "not saved: give the folder for checkpoints with --checkpoint DIR"
        try:
            self.autosave.save_now(self.meter.step)
        except CheckpointError as error:
            return f"not saved: {error}"
        return f"step {self.num_steps:,} {IS_BEING_SAVED}"

    def _change_learning_rate(self, action: ScaleLearningRate | SetLearningRate) -> str:
        optimizers, schedulers = self.stepper.bundle.optimizers, self.stepper.bundle.schedulers
        before = first_learning_rate(optimizers)
        if before is None:
            return "the learning rate was not changed: the optimizers have none"
        if isinstance(action, SetLearningRate) and before == 0:
            set_learning_rates(optimizers, action.value)
        else:
            factor = action.factor if isinstance(action, ScaleLearningRate) else action.value / before
            scale_learning_rates(optimizers, schedulers, factor)
        return f"learning rate {before:.4g} -> {first_learning_rate(optimizers):.4g}"


def describe_value(value: Any) -> str:
    """Return a description of a value in a few lines, without communication between ranks."""
    if isinstance(value, torch.nn.Module):
        return f"{type(value).__name__} with {sum(item.numel() for item in value.parameters()):,} parameters"
    if isinstance(value, torch.Tensor):
        shown = f"{type(value).__name__} of shape {tuple(value.shape)}, {value.dtype}, on {value.device}"
        is_small = type(value) in (torch.Tensor, torch.nn.Parameter) and value.numel() <= 8
        return f"{shown}: {value.detach().tolist()}" if is_small else shown
    short = reprlib.Repr()
    short.maxstring = short.maxother = 200
    return short.repr(value)


current_control_receiver: ContextVar[ControlReceiver | None] = ContextVar("accel_nb_control_receiver", default=None)
"""The receiver of actions requested of the run that an `Accelerator` belongs to; the worker sets it around a cell."""
