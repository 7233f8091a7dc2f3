"""Validation losses of loops that do not train, measured without calls in the user's code."""

from __future__ import annotations

import dis
import inspect
import sys
import time
import types
import weakref
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from accel_nb.runtime.distributed.sharded import is_sharded
from accel_nb.telemetry.events import EventSink, MetricLogged, NullEventSink
from accel_nb.telemetry.validation_names import find_training_loss

_SKIPPED_MODULES = ("accel_nb.", "torch.utils.data.")


class ValidationMeter:
    """Names the validation losses of a run, and reports them on rank 0.

    Every rank reads all batches of a loop that does not train, so that each has the loss over the whole loader.
    """

    def __init__(self, rank: int, sink: EventSink) -> None:
        self.is_on = rank == 0 and not isinstance(sink, NullEventSink)
        self._rank = rank
        self._sink = sink
        # By training loss: the loops that have a curve, in the order in which they ended first.
        self._loops: dict[str, list[tuple[Any, ...]]] = {}
        # Whether a variable is assigned again, by code and name.
        self._assignments: dict[tuple[types.CodeType, str], bool] = {}

    def begin_run(self) -> None:
        """Clear the names of the previous run."""
        self._loops.clear()
        self._assignments.clear()

    def is_assigned_anew(self, code: types.CodeType, name: str) -> bool:
        """Return whether no line of the code both reads and assigns a variable, as a line that adds to it does."""
        key = code, name
        if key not in self._assignments:
            self._assignments[key] = not _lines_of(code, name, "LOAD_") & _lines_of(code, name, "STORE_")
        return self._assignments[key]

    def report(self, step: int, training_loss: str, loop: tuple[Any, ...], value: float) -> None:
        """Report the loss of one pass over a loader; several loops have a number in the names of their curves."""
        loops = self._loops.setdefault(training_loss, [])
        if loop not in loops:
            loops.append(loop)
        number = 1 + loops.index(loop)
        name = f"validation {training_loss or 'loss'}" + (f" ({number})" if number > 1 else "")
        self._sink.emit(MetricLogged(self._rank, step, time.time(), name, value))


class ValidationLoop:
    """Computes the mean of the losses in loops over one loader that do not train.

    The loss is a variable with the name of a training loss, alone or with a word for validation (``val_loss``), that
    each iteration assigns to a tensor with one value. Its mean is weighted by the samples of the batches.
    """

    def __init__(self, meter: ValidationMeter) -> None:
        self._meter = meter
        self._iterator: weakref.ref[Any] | None = None
        self._loop: tuple[Any, ...] = ()
        self._num_trained = 0
        self._num_samples = 0
        self._weight = 0
        # By variable: the value before the current batch, and the weighted sum, which is a tensor on other devices.
        self._latest: dict[str, Any] = {}
        self._sums: dict[str, Any] = {}

    def record(
        self, iterator: Any, num_samples: int | None, num_trained: int, training_losses: Collection[str]
    ) -> None:
        """Add the loss of the previous batch; call before each batch, and with None for ``iterator`` at the end."""
        if self._iterator is None or (iterator is not None and self._iterator() is not iterator):
            if iterator is not None:
                self._begin(iterator, num_trained, training_losses)
        elif self._sums:
            self._add(num_trained)
        self._num_samples = num_samples or 1
        if iterator is None:
            self._iterator = None

    def finish(self, step: int, training_losses: Collection[str]) -> None:
        """Report the loss of the loop that has ended."""
        reported: set[str] = set()
        # A variable with the very name of the training loss comes first.
        for name in sorted(self._sums, key=lambda name: name not in training_losses):
            loss = _training_loss_of(name, training_losses)
            if loss is not None and loss not in reported and self._weight:
                reported.add(loss)
                self._meter.report(step, loss, self._loop, float(self._sums[name]) / self._weight)
        self._sums, self._latest = {}, {}

    def _begin(self, iterator: Any, num_trained: int, training_losses: Collection[str]) -> None:
        self._iterator = weakref.ref(iterator)
        self._num_trained, self._weight = num_trained, 0
        self._latest, self._sums = {}, {}
        frame = _find_loop() if training_losses else None
        if frame is None:
            return
        code, values = frame.f_code, frame.f_locals
        self._loop = id(self), code.co_filename, code.co_name, frame.f_lineno
        # The variables that the loop assigns may not exist yet.
        for name in dict.fromkeys((*code.co_names, *code.co_varnames, *code.co_cellvars)):
            is_loss = _training_loss_of(name, training_losses) is not None
            if is_loss and self._meter.is_assigned_anew(code, name):
                self._latest[name], self._sums[name] = values.get(name), 0.0

    def _add(self, num_trained: int) -> None:
        frame = _find_loop()
        if frame is None or num_trained != self._num_trained:  # a loop that trains after all
            self._sums = {}
            return
        values = frame.f_locals
        for name in list(self._sums):
            value = values.get(name)
            if not (isinstance(value, Tensor) and _is_loss(value)) or value is self._latest[name]:
                del self._sums[name]
                continue
            self._latest[name] = value
            loss = value.detach().reshape(())
            self._sums[name] += loss.to(torch.promote_types(loss.dtype, torch.float32)) * self._num_samples
        self._weight += self._num_samples


def _is_loss(value: Tensor) -> bool:
    # To read a sharded value is a collective of all ranks.
    return value.numel() == 1 and value.is_floating_point() and not is_sharded(value)


def _training_loss_of(variable: str, training_losses: Collection[str]) -> str | None:
    if variable in training_losses:
        return variable
    if variable == "loss" and "" in training_losses:
        return ""
    return find_training_loss(variable, list(training_losses))


def _find_loop() -> types.FrameType | None:
    """Return the frame of the user's loop; the callers of a generator, as of a progress bar's, receive the batches."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        is_ours = frame.f_globals.get("__name__", "").startswith(_SKIPPED_MODULES)
        if not is_ours and not frame.f_code.co_flags & inspect.CO_GENERATOR:
            return frame
        frame = frame.f_back
    return None


def _lines_of(code: types.CodeType, name: str, operation: str) -> set[int | None]:
    """Return the lines with an operation on a variable."""
    lines = list(code.co_lines())
    offsets = [
        item.offset
        for item in dis.get_instructions(code)
        # An instruction of newer versions of Python has two variables, and may both store and load.
        if operation in item.opname and name in (item.argval if isinstance(item.argval, tuple) else (item.argval,))
    ]
    return {line for offset in offsets for start, end, line in lines if start <= offset < end}
