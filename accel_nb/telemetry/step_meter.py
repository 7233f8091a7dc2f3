"""Reports of optimizer steps without waiting for the device.

A loss on the CPU is read at once. On a device with streams a loss is copied asynchronously to pinned memory, and read
after an event has recorded that the copy is complete; only then its step is reported, in order. On other devices a loss
is read after the next step has been queued.
"""

from __future__ import annotations

import time
import weakref
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
from accel_nb.telemetry.validation_meter import ValidationMeter

_NUM_SLOTS = 4096
MAX_NAME = 20
"""Maximum length of a variable's name in the name of its curve, in bytes of UTF-8."""


class StepMeter:
    """Collects the losses of a step's micro-batches and reports each optimizer step."""

    def __init__(self, rank: int, device: torch.device | str, sink: EventSink, *, raises_on_nan: bool = False) -> None:
        # All optimizer steps of the training, and those before the current run: reports number a run's steps from 1.
        self.step = 0
        self._num_before = 0
        # The variable of the latest loss, and of the first loss of the current step.
        self._loss_name = ""
        self._step_name = ""
        # The losses of the current step by variable, if there are several.
        self._losses_by_name: dict[str, float] = {}
        # The names of curves by variable and optimizer; and by variable the optimizers that have its curves.
        self._curve_names: dict[tuple[str, int], str] = {}
        self._curve_owners: dict[str, list[weakref.ref[object]]] = {}
        self._call_sites: dict[tuple[int, int], tuple[CodeType, str]] = {}
        # One report covers this many steps.
        self.interval = 1
        self._num_unreported = 0
        self._has_skipped = False
        self._raises_on_nan = raises_on_nan
        # The losses of loops that do not train.
        self.validation = ValidationMeter(rank, sink)
        self._rank = rank
        self._sink = sink
        self._sum = 0.0
        self._weight = 0
        self._num_samples = 0
        self._has_loss = False
        self._started = time.perf_counter()
        # A sink may accept the numbers of a step directly, so that no event object is created.
        self._emit_step = getattr(sink, "emit_step", None) or (lambda *values: sink.emit(StepDone(*values)))
        self._emit_metric = getattr(sink, "emit_metric", None) or (lambda *values: sink.emit(MetricLogged(*values)))
        kind = device_type(device)
        self._pending_losses = None if kind.is_host else _PinnedLosses(kind) if kind.has_streams else _DeferredLosses()

    @property
    def run_step(self) -> int:
        """The number of the latest step in its run; after a resume it continues from the checkpoint's step."""
        return self.step - self._num_before

    def allow_nan(self) -> None:
        """Report losses that are NaN like others, in place of raising `NanLossError`."""
        self._raises_on_nan = False

    def begin_run(self) -> None:
        """Number steps from 1 again, and clear the names of the previous run."""
        self._num_before = self.step
        self._loss_name = ""
        self._losses_by_name.clear()
        self._curve_names.clear()
        self._curve_owners.clear()
        self._call_sites.clear()
        self.validation.begin_run()

    @property
    def loss_names(self) -> set[str]:
        """The variable of the first loss of each reported step of the current run; "" for a loss without a variable."""
        return set(self._curve_owners)

    def resume_at(self, step: int) -> None:
        """Continue from the step of a checkpoint."""
        self.step, self._num_before = step, 0

    def number_in_run(self, step: int) -> int:
        """Return the number that a step of the training has in the current run."""
        return step - self._num_before

    def name_loss(self, caller: FrameType, loss: Tensor) -> None:
        """Set the name of the next loss to the variable that holds it in the frame that calls its backward pass.

        The result is cached by call site, because this runs in every step.
        """
        code = caller.f_code
        site = id(code), caller.f_lasti
        cached = self._call_sites.get(site)
        if cached is None:
            scope = list(caller.f_locals.items())  # a snapshot: another thread may bind globals
            names = (name for name, value in scope if value is loss and not name.startswith("_"))
            cached = self._call_sites[site] = code, next(names, "").encode()[:MAX_NAME].decode(errors="ignore")
        self._loss_name = cached[1]

    @property
    def is_reporting(self) -> bool:
        """Whether the latest step ends a reporting interval."""
        return self.step % self.interval == 0

    def add_loss(self, loss: Tensor, weight: int, num_samples: int, *, is_first: bool) -> None:
        """Add a loss with ``weight`` to the step's mean.

        With ``raises_on_nan``, NaN raises `NanLossError`: on the CPU here, on other devices when the loss is read.
        Several losses of one micro-batch are reported as their sum, so only the first of them adds its weight.
        """
        if is_first or not self._has_loss:
            self._weight += weight
            self._num_samples += num_samples
            if not self._has_loss:
                self._step_name = self._loss_name
            self._has_loss = True
        name = self._loss_name
        if self._pending_losses is None:
            value = loss.item()
            if value != value and self._raises_on_nan:
                raise NanLossError(self._rank, self.run_step + 1)
            if self._losses_by_name or name != self._step_name:
                self._losses_by_name = self._losses_by_name or {self._step_name: self._sum}
                self._losses_by_name[name] = self._losses_by_name.get(name, 0.0) + value * weight
            self._sum += value * weight
        else:
            self._pending_losses.add(loss.detach(), weight)

    def end_step(self, learning_rate: float, skipped: bool, optimizer: object = None) -> float:
        """Report a step of an optimizer and return the current time of `time.perf_counter`.

        Each pair of variable and optimizer has a curve. A second optimizer's step after the same losses is not
        reported.
        """
        now = time.perf_counter()
        if not self._has_loss:
            return now
        self.step += 1
        num_steps = 1
        if self.interval != 1 or self._num_unreported:
            self._num_unreported += 1
            self._has_skipped |= skipped
            self._has_loss = False
            if self.step % self.interval:
                return now
            num_steps, skipped = self._num_unreported, self._has_skipped
            self._num_unreported, self._has_skipped = 0, False
        weight, step_s = self._weight, (now - self._started) / num_steps
        if self._pending_losses is None:
            loss = self._sum / weight if weight else self._sum
            curve = self._curve_names.get((self._step_name, id(optimizer)))
            if curve is None:
                curve = self._name_curve(optimizer)
            timestamp = time.time()
            self._emit_step(
                self._rank, self.run_step, timestamp, loss, learning_rate, step_s, self._num_samples, skipped, curve
            )
            if self._losses_by_name:
                self._report_losses(timestamp, weight)
        else:
            curve = self._name_curve(optimizer)
            pending = _PendingStep(
                self.run_step, time.time(), learning_rate, step_s, self._num_samples, skipped, weight, curve
            )
            self._pending_losses.close_step(pending)
            self._report_ready(wait=self._pending_losses.is_full)
        self._sum, self._weight, self._num_samples, self._started = 0.0, 0, 0, now
        self._has_loss = False
        return now

    def report_norm(self, norm: Tensor) -> None:
        """Report the gradient norm that clipping has computed before a step; on asynchronous devices do nothing.

        Reading the norm there would wait for the backward pass.
        """
        step = self.step + 1
        if self._pending_losses is not None or step % self.interval or not self._has_loss:
            return
        first_name = next(iter(self._curve_owners), self._step_name)
        name = "gradient norm" if first_name == self._step_name else f"gradient norm of {self._step_name}"
        self._emit_metric(self._rank, step - self._num_before, time.time(), name, norm.item())

    def report_value(self, name: str, value: float) -> None:
        """Report a number of the step that has ended last."""
        self._emit_metric(self._rank, self.run_step, time.time(), name, value)

    def restart_clock(self) -> None:
        """Measure the next step from now on, so that its time excludes the work since the last step."""
        self._started = time.perf_counter()

    def flush(self) -> None:
        """Report the steps that have not been reported yet; waits for the device."""
        if self._pending_losses is not None:
            self._report_ready(wait=True)

    def _name_curve(self, optimizer: object) -> str:
        """Return the name of a curve: the variable, with a number if other optimizers have curves of that name."""
        key = self._step_name, id(optimizer)
        if key not in self._curve_names:
            owners = self._curve_owners.setdefault(self._step_name, [])
            number = 1 + len(owners)
            self._curve_names[key] = self._step_name if number == 1 else f"{self._step_name or 'loss'} ({number})"
            # Another optimizer may get the id of one that is gone.
            owner = self if optimizer is None else optimizer
            owners.append(weakref.ref(owner, lambda _: self._curve_names.pop(key, None)))
        return self._curve_names[key]

    def _report_losses(self, timestamp: float, weight: int) -> None:
        """Report each of several losses of a step under the name of its variable."""
        for name, total in self._losses_by_name.items():
            value = total / weight if weight else total
            self._sink.emit(MetricLogged(self._rank, self.run_step, timestamp, name or "loss", value))
        self._losses_by_name = {}

    def _report_ready(self, *, wait: bool) -> None:
        assert self._pending_losses is not None
        for pending, loss in self._pending_losses.pop_ready(wait=wait):
            if loss != loss and self._raises_on_nan:
                raise NanLossError(self._rank, pending.step)
            self._sink.emit(
                StepDone(
                    self._rank, pending.step, pending.time, loss / pending.weight if pending.weight else loss,
                    pending.learning_rate, pending.step_s, pending.num_samples, pending.skipped, pending.curve,
                )
            )  # fmt: skip


@dataclass(slots=True)
class _PendingStep:
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
    """Losses kept on an asynchronous device without streams until the next step has been queued."""

    is_full = False

    def __init__(self) -> None:
        self._losses: list[tuple[Tensor, int]] = []
        self._steps: deque[tuple[_PendingStep, list[tuple[Tensor, int]]]] = deque()

    def add(self, loss: Tensor, weight: int) -> None:
        """Store one loss, without reading it."""
        self._losses.append((loss, weight))

    def close_step(self, pending: _PendingStep) -> None:
        """Mark the end of a step."""
        self._steps.append((pending, self._losses))
        self._losses = []

    def pop_ready(self, *, wait: bool) -> list[tuple[_PendingStep, float]]:
        """Return steps, oldest first, with the weighted sums of their losses: without ``wait`` all but the latest."""
        ready: list[tuple[_PendingStep, float]] = []
        while len(self._steps) > (0 if wait else 1):
            pending, losses = self._steps.popleft()
            ready.append((pending, sum(loss.item() * weight for loss, weight in losses)))
        return ready


class _PinnedLosses:
    """Losses that are copied asynchronously from a device into a ring of pinned memory."""

    def __init__(self, kind: DeviceType) -> None:
        self._kind = kind
        self._slots = torch.empty(_NUM_SLOTS, dtype=torch.float32, pin_memory=kind.pins_memory, device="cpu")
        self._views = [self._slots[i] for i in range(_NUM_SLOTS)]
        self._values: Any = self._slots.numpy()
        self._next = 0
        self._num_used = 0
        self._weights: list[tuple[int, int]] = []
        # The weighted sum of the losses of a step that has more than there are slots.
        self._rest: Tensor | None = None
        self._steps: deque[tuple[_PendingStep, list[tuple[int, int]], Any]] = deque()
        self._events: list[Any] = []

    @property
    def is_full(self) -> bool:
        """Whether more than half of the ring is in use."""
        return self._num_used > _NUM_SLOTS // 2

    def add(self, loss: Tensor, weight: int) -> None:
        """Start the copy of one loss."""
        if len(self._weights) < _NUM_SLOTS // 2:
            self._copy(loss, weight)
        else:
            part = loss.reshape(()).to(torch.float32) * weight
            self._rest = part if self._rest is None else self._rest + part

    def _copy(self, loss: Tensor, weight: int) -> None:
        slot = self._next
        self._next = (slot + 1) % _NUM_SLOTS
        self._num_used += 1
        self._views[slot].copy_(loss.reshape(()), non_blocking=True)
        self._weights.append((slot, weight))

    def close_step(self, pending: _PendingStep) -> None:
        """Record an event after the copies of a step's losses."""
        if self._rest is not None:
            self._copy(self._rest, 1)
            self._rest = None
        event = self._events.pop() if self._events else self._kind.new_event()
        event.record()
        self._steps.append((pending, self._weights, event))
        self._weights = []

    def pop_ready(self, *, wait: bool) -> list[tuple[_PendingStep, float]]:
        """Return the steps whose losses have been copied, oldest first, with the weighted sums of their losses."""
        ready: list[tuple[_PendingStep, float]] = []
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
