"""Reports of optimizer steps without waiting for the device.

A loss on the CPU is read at once. On a device with streams a loss is copied asynchronously to pinned memory, and read
when an event shows that the copy is done; its step is reported then, in order. On other devices a loss is read when the
next step has been queued.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from accel_nb.errors import NanLossError
from accel_nb.runtime.devices.base import DeviceType
from accel_nb.runtime.devices.registry import device_type
from accel_nb.telemetry.events import EventSink, MetricLogged, StepDone

_NUM_SLOTS = 4096
MAX_NAME = 20
"""Limit of a variable's name in the name of its curve."""


class StepMeter:
    """Collects the losses of a step's micro-batches and reports each optimizer step."""

    def __init__(self, rank: int, device: torch.device | str, sink: EventSink, *, refuses_nan: bool = False) -> None:
        # Optimizer steps of the training, and those that were made before the current run: reports count from 1.
        self.step = 0
        self._num_before = 0
        # The variable that held the latest loss; the losses of the open step by variable, where there are several; and
        # the names of curves by variable and optimizer.
        self._loss_name = ""
        self._step_name = ""
        self._parts: dict[str, float] = {}
        self._curve_names: dict[tuple[str, int], str] = {}
        self._call_sites: dict[tuple[int, int], tuple[CodeType, str]] = {}
        # One report covers this many steps.
        self.interval = 1
        self._num_held = 0
        self._has_skipped = False
        self._refuses_nan = refuses_nan
        self._rank = rank
        self._sink = sink
        self._sum = 0.0
        self._weight = 0
        self._num_samples = 0
        self._has_loss = False
        self._started = time.perf_counter()
        # A sink may accept a step's numbers, without an event being made of them.
        self._emit_step = getattr(sink, "emit_step", None) or (lambda *values: sink.emit(StepDone(*values)))
        self._emit_metric = getattr(sink, "emit_metric", None) or (lambda *values: sink.emit(MetricLogged(*values)))
        kind = device_type(device)
        self._copies = None if kind.is_host else _PinnedLosses(kind) if kind.has_streams else _DeferredLosses()

    @property
    def run_step(self) -> int:
        """The number of the latest step in its run; a run that resumes a checkpoint goes on from the step of that."""
        return self.step - self._num_before

    def begin_run(self) -> None:
        """Number steps from 1 again, and forget the names of the run before."""
        self._num_before = self.step
        self._loss_name = ""
        self._parts.clear()
        self._curve_names.clear()
        self._call_sites.clear()

    def resume_at(self, step: int) -> None:
        """Go on from the step of a checkpoint."""
        self.step, self._num_before = step, 0

    def number_in_run(self, step: int) -> int:
        """Return the number in the run of a step of the training."""
        return step - self._num_before

    def name_loss(self, caller: FrameType, loss: Tensor) -> None:
        """Set the name of the next loss: of the variable that holds it where its backward pass is called.

        Variables are searched once for each call in the code: this is on the hot path.
        """
        code = caller.f_code
        site = id(code), caller.f_lasti
        known = self._call_sites.get(site)
        if known is None:
            names = (name for name, value in caller.f_locals.items() if value is loss and not name.startswith("_"))
            known = self._call_sites[site] = code, next(names, "")[:MAX_NAME]
        self._loss_name = known[1]

    @property
    def is_reporting(self) -> bool:
        """Whether the latest step is one to report."""
        return self.step % self.interval == 0

    def add_loss(self, loss: Tensor, weight: int, num_samples: int, *, is_first: bool) -> None:
        """Count a loss with ``weight`` in the step's mean; raises `NanLossError` for NaN with ``refuses_nan``.

        Several losses of one micro-batch are reported as their sum: only the first of them adds its weight.
        """
        if is_first or not self._has_loss:
            self._weight += weight
            self._num_samples += num_samples
            if not self._has_loss:
                self._step_name = self._loss_name
            self._has_loss = True
        name = self._loss_name
        if self._copies is None:
            value = loss.item()
            if value != value and self._refuses_nan:
                raise NanLossError(self._rank, self.run_step + 1)
            if self._parts or name != self._step_name:
                self._parts = self._parts or {self._step_name: self._sum}
                self._parts[name] = self._parts.get(name, 0.0) + value * weight
            self._sum += value * weight
        else:
            self._copies.add(loss.detach(), weight)

    def end_step(self, learning_rate: float, skipped: bool, optimizer: object = None) -> float:
        """Report a step of an optimizer and return the time of `time.perf_counter`.

        The steps of each variable and optimizer are a curve. A second optimizer's step after the same losses is not
        reported.
        """
        now = time.perf_counter()
        if not self._has_loss:
            return now
        self.step += 1
        num_steps = 1
        if self.interval != 1 or self._num_held:
            self._num_held += 1
            self._has_skipped |= skipped
            self._has_loss = False
            if self.step % self.interval:
                return now
            num_steps, skipped = self._num_held, self._has_skipped
            self._num_held, self._has_skipped = 0, False
        weight, step_s = self._weight, (now - self._started) / num_steps
        if self._copies is None:
            loss = self._sum / weight if weight else self._sum
            curve = self._curve_names.get((self._step_name, id(optimizer)))
            if curve is None:
                curve = self._name_curve(optimizer)
            moment = time.time()
            self._emit_step(
                self._rank, self.run_step, moment, loss, learning_rate, step_s, self._num_samples, skipped, curve
            )
            if self._parts:
                self._report_parts(moment, weight)
        else:
            curve = self._name_curve(optimizer)
            pending = _Pending(
                self.run_step, time.time(), learning_rate, step_s, self._num_samples, skipped, weight, curve
            )
            self._copies.close_step(pending)
            self._report_ready(wait=self._copies.is_full)
        self._sum, self._weight, self._num_samples, self._started = 0.0, 0, 0, now
        self._has_loss = False
        return now

    def report_norm(self, norm: Tensor) -> None:
        """Report the gradient norm that clipping has computed for the step to come, where reading it waits for nothing.

        On a device with a queue it is not read: that would wait for the backward pass.
        """
        step = self.step + 1
        if self._copies is not None or step % self.interval or not self._has_loss:
            return
        known = next(iter(self._curve_names), (self._step_name, 0))[0]
        name = "gradient norm" if known == self._step_name else f"gradient norm of {self._step_name}"
        self._emit_metric(self._rank, step - self._num_before, time.time(), name, norm.item())

    def restart_clock(self) -> None:
        """Measure the next step from now: what was done since the last one is no part of it."""
        self._started = time.perf_counter()

    def flush(self) -> None:
        """Report the steps that are not reported yet; waits for the device."""
        if self._copies is not None:
            self._report_ready(wait=True)

    def _name_curve(self, optimizer: object) -> str:
        """Return the name of a variable's curve; it has a number where the variable was another optimizer's before."""
        key = self._step_name, id(optimizer)
        if key not in self._curve_names:
            number = 1 + sum(name == self._step_name for name, _ in self._curve_names)
            shown = self._step_name if number == 1 else f"{self._step_name or 'loss'} ({number})"
            self._curve_names[key] = shown
        return self._curve_names[key]

    def _report_parts(self, moment: float, weight: int) -> None:
        """Report each of several losses of a step by its variable."""
        for name, total in self._parts.items():
            value = total / weight if weight else total
            self._sink.emit(MetricLogged(self._rank, self.run_step, moment, name or "loss", value))
        self._parts = {}

    def _report_ready(self, *, wait: bool) -> None:
        assert self._copies is not None
        for pending, loss in self._copies.take_ready(wait=wait):
            if loss != loss and self._refuses_nan:
                raise NanLossError(self._rank, pending.step)
            self._sink.emit(
                StepDone(
                    self._rank, pending.step, pending.time, loss / pending.weight if pending.weight else loss,
                    pending.learning_rate, pending.step_s, pending.num_samples, pending.skipped, pending.curve,
                )
            )  # fmt: skip


@dataclass(slots=True)
class _Pending:
    """A step whose losses have not been read from the device yet."""

    step: int
    time: float
    learning_rate: float
    step_s: float
    num_samples: int
    skipped: bool
    weight: int
    curve: str


class _DeferredLosses:
    """Losses kept on an asynchronous device without streams; those of the latest step are not read yet."""

    is_full = False

    def __init__(self) -> None:
        self._losses: list[tuple[Tensor, int]] = []
        self._steps: deque[tuple[_Pending, list[tuple[Tensor, int]]]] = deque()

    def add(self, loss: Tensor, weight: int) -> None:
        """Keep one loss."""
        self._losses.append((loss, weight))

    def close_step(self, pending: _Pending) -> None:
        """Mark the end of a step."""
        self._steps.append((pending, self._losses))
        self._losses = []

    def take_ready(self, *, wait: bool) -> list[tuple[_Pending, float]]:
        """Return the steps before the latest one, or with ``wait`` all, oldest first, with their sums of losses."""
        ready: list[tuple[_Pending, float]] = []
        while len(self._steps) > (0 if wait else 1):
            pending, losses = self._steps.popleft()
            ready.append((pending, sum(loss.item() * weight for loss, weight in losses)))
        return ready


class _PinnedLosses:
    """Losses that are copied asynchronously from a device into a ring of pinned memory."""

    def __init__(self, kind: DeviceType) -> None:
        self._kind = kind
        self._slots = torch.empty(_NUM_SLOTS, dtype=torch.float32, pin_memory=kind.pins_memory)
        self._views = [self._slots[i] for i in range(_NUM_SLOTS)]
        self._values: Any = self._slots.numpy()
        self._next = 0
        self._num_used = 0
        self._weights: list[tuple[int, int]] = []
        self._steps: deque[tuple[_Pending, list[tuple[int, int]], Any]] = deque()
        self._events: list[Any] = []

    @property
    def is_full(self) -> bool:
        """Whether more than half of the ring is in use."""
        return self._num_used > _NUM_SLOTS // 2

    def add(self, loss: Tensor, weight: int) -> None:
        """Start the copy of one loss."""
        if len(self._weights) >= _NUM_SLOTS // 2:  # thousands of losses in a step: report the mean of the first
            return
        slot = self._next
        self._next = (slot + 1) % _NUM_SLOTS
        self._num_used += 1
        self._views[slot].copy_(loss.reshape(()), non_blocking=True)
        self._weights.append((slot, weight))

    def close_step(self, pending: _Pending) -> None:
        """Record the end of a step in the stream of copies."""
        event = self._events.pop() if self._events else self._kind.new_event()
        event.record()
        self._steps.append((pending, self._weights, event))
        self._weights = []

    def take_ready(self, *, wait: bool) -> list[tuple[_Pending, float]]:
        """Return the steps whose losses have arrived, oldest first, with the weighted sum of their losses."""
        ready: list[tuple[_Pending, float]] = []
        while self._steps:
            pending, weights, event = self._steps[0]
            if wait:
                event.synchronize()
            elif not event.query():
                break
            self._steps.popleft()
            self._events.append(event)
            self._num_used -= len(weights)
            ready.append((pending, sum(float(self._values[slot]) * weight for slot, weight in weights)))
        return ready
