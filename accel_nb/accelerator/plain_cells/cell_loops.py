"""The loops of a plain cell over loaders: which of them train, and which read whole batches or shares."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader

from accel_nb.accelerator.core import Accelerator
from accel_nb.accelerator.model_division.divided_calls import DividedCalls
from accel_nb.accelerator.plain_cells.cell_warnings import warn_evaluation_mode, warn_undivided_loader
from accel_nb.accelerator.plain_cells.detection.distributed_objects import has_distributed_sampler
from accel_nb.accelerator.plain_cells.detection.training_detection import find_training_code
from accel_nb.accelerator.plain_cells.detection.unmanaged_tensors import UnmanagedTensors
from accel_nb.accelerator.plain_cells.loop_division import LoopDivision
from accel_nb.accelerator.plain_cells.loss_proof.loss_check import LossCheck
from accel_nb.accelerator.plain_cells.preparation import Preparation
from accel_nb.accelerator.plain_cells.replacements.backward_passes import BackwardPasses
from accel_nb.accelerator.prepare.preparer import WorkDivision
from accel_nb.data.loader import is_sharded


class CellLoops:
    """The `LoopPolicy` of plain cells. Every rank must begin the same loops.

    A loop trains if its code leads to a backward pass. `LoopDivision` decides how a loop that trains is divided.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        preparation: Preparation,
        division: LoopDivision,
        calls: DividedCalls,
        loss_check: LossCheck,
        passes: BackwardPasses,
    ) -> None:
        self._accelerator = accelerator
        self._stepper = accelerator.components.stepper
        self._preparation = preparation
        self._division = division
        self._calls = calls
        self._loss_check = loss_check
        self._passes = passes
        self._unmanaged = UnmanagedTensors(accelerator)
        self._has_undivided_loop = False
        # By code and loader: the current loop, if it began in evaluation mode, and all such loops that called backward.
        self._evaluation_loop: tuple[types.CodeType, int] | None = None
        self._trains_in_evaluation_mode: set[tuple[types.CodeType, int]] = set()

    def begin_cell(self) -> None:
        """Reset for a new cell."""
        self._has_undivided_loop = False
        self._evaluation_loop = None
        self._unmanaged.begin_cell()

    def begin_statement(self, namespace: dict[str, Any], names: Iterable[str], bound: Iterable[str]) -> None:
        """Set the names in which tensors are searched; the cell assigns those in ``bound`` before it reads them."""
        self._unmanaged.begin_statement(namespace, names, bound)

    def is_training(self) -> bool:
        """Return whether gradients are enabled, and a model that an optimizer steps, if any, is in training mode."""
        models = self._stepper.stepped_models()
        return torch.is_grad_enabled() and (not models or any(model.training for model in models))

    def begin_loop(self, loader: DataLoader[Any]) -> bool:
        """Return whether the loop that starts over ``loader`` trains with its batches; prepare the objects it trains.

        `LoopDivision` decides whether ranks read whole batches or shares. In a loop that does not train, every rank
        reads the whole loader. The receipt shows how each loader is read.
        """
        preparer = self._accelerator.components.preparer
        code = self._training_code(loader)
        if not is_sharded(loader):  # the caller shards it if the loop trains, and then the loop begins again
            return code is not None
        if code is None:
            reading = self._division.begin_whole(loader)
        elif not self._division.divides_models:
            reading = None
            self._division.begin_shares()
            self._loss_check.trace_loop(code, loader)
        else:
            preparer.refresh()
            self._division.begin_training(code, loader)
            reading = self._division.describe_division(loader)
        if preparer.record_division(loader, reading):
            self._accelerator.report(self._preparation.used)
        if code is None:
            return False
        return preparer.begin_epoch(reads_shares=reading is None)

    def describe_division(self, loader: DataLoader[Any]) -> WorkDivision | None:
        """Return how the work on whole batches of a loader is divided; None if ranks read shares."""
        return self._division.describe_division(loader)

    def wrap_forward(self, model: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any] | None:
        """Return a forward that divides its rows among the ranks.

        Return None if there is one rank, for a model without tensors and for a `ScriptModule`.
        """
        has_tensors = any(True for _ in chain(model.parameters(), model.buffers()))
        is_alone = self._accelerator.components.data_world.size == 1
        if is_alone or not has_tensors or isinstance(model, torch.jit.ScriptModule):
            return None
        return self._calls.wrap_forward(model, forward)

    def wrap_loader_iter(self, original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        """Return an ``__iter__`` that shards a loader that no name of the cell references, if the loop trains."""

        @functools.wraps(original)
        def __iter__(loader: DataLoader[Any]) -> Iterator[Any]:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            is_handled = (
                is_sharded(loader)
                or has_distributed_sampler(loader)
                or caller.startswith("accel_nb.")
                or type(loader).__iter__ is not __iter__
            )
            if not is_handled and self._preparation.has_optimizers() and self.begin_loop(loader):
                self._preparation.prepare([loader])
                return iter(loader)
            return original(loader)

        return __iter__

    def check_before_backward(self) -> None:
        """Warn if the loop that calls backward was treated as an evaluation, or has batches that are not divided."""
        stepper = self._stepper
        if self._evaluation_loop is not None:
            self._trains_in_evaluation_mode.add(self._evaluation_loop)
            self._evaluation_loop = None
            warn_evaluation_mode(self._accelerator)
        if self._has_undivided_loop and stepper.bundle.models:
            self._has_undivided_loop = False
            if self._accelerator.components.preparer.undivided_batch.is_current(stepper.window.share):
                stepper.window.set_share(None)  # the share belongs to an earlier loop that was left
            if stepper.window.share is None and not self._calls.is_on:
                warn_undivided_loader(self._accelerator)

    def _training_code(self, loader: DataLoader[Any]) -> types.CodeType | None:
        """Return the code of a loop that trains with ``loader``; None if each rank reads the whole loader."""
        if not torch.is_grad_enabled() or self._division.mode == "none":
            return None
        found = None if self._stepper.computes_alone() else find_training_code()
        if found is None:
            self._has_undivided_loop = self._passes.needs_check = True
            return None
        window = self._stepper.window
        if window.size > 1 and not window.averages_each_batch:
            # Code that reads or changes gradients within a window must find all ranks' gradients.
            window.averages_each_batch = found.reads_gradients()
        self._preparation.prepare_new_optimizers(loader)
        is_untraced = not self._division.divides_models and self._may_evaluate(found.code, loader)
        has_unmanaged = self._unmanaged.are_trained()
        if has_unmanaged:
            self._calls.is_on = False  # a model's code may use these tensors, whose gradients are not averaged
        if has_unmanaged or is_untraced or not _has_batches(loader):
            self._read_undivided()
            return None
        return found.code

    def _may_evaluate(self, code: types.CodeType, loader: DataLoader[Any]) -> bool:
        """Return whether a loop over ``loader`` may only evaluate, since no model is in training mode.

        A loop in evaluation mode trains if an earlier loop with the same code and loader has called backward.
        """
        self._evaluation_loop = None
        if self.is_training() or (code, id(loader)) in self._trains_in_evaluation_mode:
            return False
        self._evaluation_loop = code, id(loader)
        self._passes.needs_check = True
        return True

    def _read_undivided(self) -> None:
        """Make every rank read the same batches in a loop that trains; every rank must call."""
        self._stepper.window.set_share(None)
        self._division.synchronize_rng()


def _has_batches(loader: DataLoader[Any]) -> bool:
    """Return whether a loader yields batches: without a batch sampler its items may be single samples."""
    return loader.batch_sampler is not None or isinstance(loader.sampler, BatchSampler)
