"""Steering a run under way: what was asked for is done after the same step on every rank.

Ranks exchange nothing for that. Each counts the ends of steps at which its loop asks for a next batch. When something
is asked, every rank's monitor thread answers with this count, and the rank waits at its next end of a step until it is
told at which count all of them do it: one later than any has come to. That is a rendezvous through the kernel which no
rank can miss, and which costs nothing as long as nothing is asked: the flag is in memory and is looked at.
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
from accel_nb.accelerator.training.lr_control import first_rate, scale_rates, set_rates
from accel_nb.accelerator.training.stepper import Stepper
from accel_nb.errors import CheckpointError
from accel_nb.telemetry.actions import (
    Action,
    Inspect,
    MapMemory,
    SaveNow,
    ScaleRate,
    SetInterval,
    SetRate,
    StopAfterStep,
)
from accel_nb.telemetry.step_meter import StepMeter

NO_MAP = "not mapped: the device has no allocator of its own to look into"


class TrainingStopped(KeyboardInterrupt):
    """The run was asked to stop after a step. A cell that is left by it counts as finished."""


@dataclass(slots=True)
class Due:
    """An action that all ranks do when they have counted to ``at``."""

    at: int
    number: int
    action: Action


class Steering:
    """One rank's part in it. `propose` and `decide` are called in the monitor thread, the rest in the main one."""

    def __init__(
        self,
        tell: Callable[[int, int, str], object],
        look: Callable[[str], str],
        map_memory: Callable[[int], str] = lambda step: NO_MAP,
    ) -> None:
        """``tell`` says what was done, ``look`` what a name holds; ``map_memory`` reports after a step, and says so."""
        self._tell = tell
        self._look = look
        self._map_memory = map_memory
        self._changed = threading.Condition()
        self.begin_run()

    def begin_run(self) -> None:
        """Forget what was asked of the run before."""
        self.count = 0
        # All that a step looks at.
        self.is_pending = False
        self._held: tuple[int, Action] | None = None
        self._due: list[Due] = []
        self.stopped_step: int | None = None

    def propose(self, number: int, action: Action) -> int:
        """Hold this rank at its next end of a step, and return how many it has come to: it will not pass another."""
        with self._changed:
            self._held = number, action
            self.is_pending = True  # first: a rank that misses it has counted already
            return self.count

    def decide(self, number: int, at: int | None) -> None:
        """Hear at which count all ranks do what was proposed; None: they do not."""
        with self._changed:
            if self._held is None or self._held[0] != number:
                return
            action, self._held = self._held[1], None
            if at is not None:
                self._due.append(Due(at, number, action))
            self.is_pending = bool(self._due)
            self._changed.notify_all()

    def attend(self, helm: Helm) -> None:
        """Wait for what is being decided, and do what is due; raises `TrainingStopped` where that is to stop."""
        with self._changed:
            while self._held is not None:
                self._changed.wait()
            due = [item for item in self._due if item.at <= self.count]
            self._due = [item for item in self._due if item.at > self.count]
            self.is_pending = bool(self._due)
        step = helm.num_steps
        for item in sorted(due, key=lambda item: isinstance(item.action, StopAfterStep)):
            self._tell(item.number, step, self._do(item.action, helm))
        if any(isinstance(item.action, StopAfterStep) for item in due):
            self.stopped_step = step
            raise TrainingStopped

    def _do(self, action: Action, helm: Helm) -> str:
        if isinstance(action, Inspect):
            return "\n".join(f"{name} = {self._look(name)}" for name in action.names)
        if isinstance(action, MapMemory):
            return self._map_memory(helm.num_steps)
        return helm.do(action)


@dataclass(slots=True)
class Helm:
    """What of one accelerator can be steered; it does not hold the accelerator."""

    steering: Steering
    stepper: Stepper
    meter: StepMeter
    autosave: Autosave | None = None
    _seen_step: int = 0

    @property
    def num_steps(self) -> int:
        """How many optimizer steps were made."""
        return self.meter.step

    def boundary(self) -> None:
        """Hear that a loop is done with a batch; this is on the hot path.

        A batch inside of an accumulation window ends no step, nor does one that trains nothing; and ranks that have run
        out of data come to fewer batches than the others.
        """
        step = self.meter.step
        if step == self._seen_step or self.stepper.is_joined:
            return
        self._seen_step = step
        steering = self.steering
        steering.count += 1
        if steering.is_pending:
            steering.attend(self)

    def begin_run(self) -> None:
        """Hear that a cell begins: what it reports is every step again."""
        self._seen_step = self.num_steps
        self.meter.interval = 1

    def do(self, action: Action) -> str:
        """Do an action between two steps and say what was done."""
        if isinstance(action, StopAfterStep):
            return f"stopped after step {self.num_steps:,}" + ("" if self.autosave is None else f": {self._save()}")
        if isinstance(action, SaveNow):
            return self._save()
        if isinstance(action, SetInterval):
            self.meter.interval = action.steps
            return "every step is reported" if action.steps == 1 else f"every {action.steps:,} steps are reported"
        assert isinstance(action, ScaleRate | SetRate)
        return self._change_rate(action)

    def _save(self) -> str:
        if self.autosave is None:
            return "not saved: --checkpoint DIR says where checkpoints go"
        try:
            self.autosave.save_now(self.num_steps)
        except CheckpointError as error:
            return f"not saved: {error}"
        return f"step {self.num_steps:,} is being saved"

    def _change_rate(self, action: ScaleRate | SetRate) -> str:
        optimizers, schedulers = self.stepper.bundle.optimizers, self.stepper.bundle.schedulers
        before = first_rate(optimizers)
        if before is None:
            return "the learning rate was not changed: the optimizers have none"
        if isinstance(action, SetRate) and before == 0:
            set_rates(optimizers, action.value)
        else:
            factor = action.factor if isinstance(action, ScaleRate) else action.value / before
            scale_rates(optimizers, schedulers, factor)
        return f"learning rate {before:.4g} -> {first_rate(optimizers):.4g}"


def describe_value(value: Any) -> str:
    """Say what a name holds in a line or a few, without a message between ranks."""
    if isinstance(value, torch.nn.Module):
        return f"{type(value).__name__} with {sum(item.numel() for item in value.parameters()):,} parameters"
    if isinstance(value, torch.Tensor):
        shown = f"{type(value).__name__} of shape {tuple(value.shape)}, {value.dtype}, on {value.device}"
        is_small = type(value) in (torch.Tensor, torch.nn.Parameter) and value.numel() <= 8
        return f"{shown}: {value.detach().tolist()}" if is_small else shown
    short = reprlib.Repr()
    short.maxstring = short.maxother = 200
    return short.repr(value)


current_steering: ContextVar[Steering | None] = ContextVar("accel_nb_steering", default=None)
"""What an Accelerator is steered by; the worker sets it around a cell."""
