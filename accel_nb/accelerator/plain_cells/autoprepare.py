"""Plain cells: code for one device that runs on many workers, with functions of torch replaced while it runs."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from accel_nb.accelerator.core import Accelerator
from accel_nb.accelerator.model_division.divided_calls import DividedCalls
from accel_nb.accelerator.plain_cells.cell_loops import CellLoops
from accel_nb.accelerator.plain_cells.cell_warnings import (
    library_step_check,
    warn_gathered_counts,
    warn_gradients_left,
    warn_rows_differ,
    warn_unequal_shares,
    warn_unequal_values,
)
from accel_nb.accelerator.plain_cells.detection.model_hooks import has_inner_hooks
from accel_nb.accelerator.plain_cells.detection.module_calls import ModuleCallHooks
from accel_nb.accelerator.plain_cells.detection.unprepared_objects import UnpreparedObjects
from accel_nb.accelerator.plain_cells.loop_division import LoopDivision
from accel_nb.accelerator.plain_cells.loss_proof.loss_check import LossCheck
from accel_nb.accelerator.plain_cells.preparation import Preparation
from accel_nb.accelerator.plain_cells.replacements import sharded_code, torchscript
from accel_nb.accelerator.plain_cells.replacements.backward_passes import BackwardPasses
from accel_nb.accelerator.plain_cells.replacements.clipping import replace_clip_norm, replace_clip_value
from accel_nb.accelerator.plain_cells.replacements.device_moves import (
    FACTORIES,
    METHODS,
    collect_factories,
    make_device_mapping,
    replace_cuda,
    replace_factory,
    replace_to,
)
from accel_nb.accelerator.plain_cells.replacements.file_functions import FileFunctions
from accel_nb.accelerator.plain_cells.replacements.gradient_data import GradientData
from accel_nb.accelerator.plain_cells.replacements.gradient_hooks import replace_register_hook
from accel_nb.accelerator.plain_cells.replacements.held_gradients import HeldGradients
from accel_nb.accelerator.plain_cells.replacements.replaced_functions import ReplacedFunctions
from accel_nb.accelerator.plain_cells.replacements.shared_seeds import SharedSeeds
from accel_nb.data.order import BatchShare
from accel_nb.errors import UnsyncedGradientError
from accel_nb.runtime.distributed import metric_gathering, sharded
from accel_nb.runtime.process.user_code import is_run_by_library, is_user_module


class PlainCells:
    """Prepares the objects that plain cells train, for one accelerator. Every rank must run the same cells.

    `prepare` prepares the objects that a cell's names reference, jointly, before the statements that could train.
    Objects made in functions and loops are prepared at first use: when a module is called, a loader is iterated,
    gradients are cleared or a backward pass begins.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._stepper = accelerator.components.stepper
        self._stepper.adapt_to_plain_cells()
        self._stepper.window.counts_batches = False  # a plain cell accumulates gradients as on one device
        # This rank's share of the batch in which the latest cell ended; None if the batch was not divided.
        self.last_share: BatchShare | None = None
        self._namespace: dict[str, Any] = {}
        self._calls = ModuleCallHooks()
        self._loss_check = LossCheck(accelerator, self._calls)
        components = accelerator.components
        self._divided_calls = DividedCalls(
            self._stepper,
            components.groups.data,
            is_compiled=components.compiler.has_compiled_any,
            has_hooks=has_inner_hooks,
            on_unequal=self._handle_unequal_calls,
            on_difference=functools.partial(warn_rows_differ, accelerator),
            has_stages=components.groups.mesh.pp > 1,
        )
        self._passes = BackwardPasses(self._stepper, self._divided_calls, self._loss_check, self._check_before_backward)
        self._preparation = Preparation(accelerator, self._calls, self._passes, self._prepare_jointly)
        self._division = LoopDivision(accelerator, self._divided_calls, self._preparation.used)
        self._loops = CellLoops(
            accelerator, self._preparation, self._division, self._divided_calls, self._loss_check, self._passes
        )
        self._functions = ReplacedFunctions()
        self._files = FileFunctions(components.comm)
        self._shared_seeds = SharedSeeds()
        self._gradient_data = GradientData(self._prepared_parameters, components.strategy.is_gathered)
        self._held_gradients = HeldGradients(self._stepper)
        self._writes_once = False

    def prepare(self, namespace: dict[str, Any], names: Iterable[str], bound: Iterable[str] = ()) -> UnpreparedObjects:
        """Prepare, jointly, the objects that a cell's names reference, once there is an optimizer; return them.

        A loader's batch is the global batch unless the options set another meaning, and is divided only in loops that
        train. Prepared objects that are no longer referenced are released. Every rank must call, with the same names.
        ``bound`` are the names that the cell binds before it reads them: until then they have values of earlier cells.
        """
        listed = tuple(names)
        self._loops.begin_statement(namespace, listed, bound)
        self._namespace = self._stepper.namespace = namespace
        self._functions.bind_imported(namespace)
        return self._preparation.prepare_named(namespace, listed)

    @contextmanager
    def run_cell(
        self,
        *,
        may_depend_on_rank: bool = False,
        is_on_some_ranks: bool = False,
        first_rank: int = 0,
        entropy: int | None = None,
        namespace: dict[str, Any] | None = None,
        at_end: Callable[[], object] = lambda: None,
    ) -> Iterator[None]:
        """Replace functions of torch while the block runs, so that code for one device runs on many workers.

        ``loss.backward()`` calls the accelerator's backward, gradient clipping averages gradients first, and the device
        ``cuda`` is the device of this worker. Unless the cell ``may_depend_on_rank``, models are divided, rank
        0's version of a file that every rank writes is kept, and generators without a seed get the same seed
        on all ranks, which pass the same ``entropy``.
        With ``is_on_some_ranks`` only some ranks run the cell: each computes by itself and runs the commands, and
        ``first_rank``, the lowest of them, writes the files. The replacements apply to the whole process until the
        block ends.
        ``at_end`` is called last; files that it writes are the cell's. Names of ``namespace`` that the cell has bound
        to replaced functions are bound to the original ones when it ends.
        """
        self._writes_once = self._stepper.world.size > 1 and not may_depend_on_rank
        self._passes.needs_check = True
        self._passes.has_unused_gradients = False
        self.last_share = None
        self._preparation.begin_cell(is_on_some_ranks=is_on_some_ranks)
        self._loops.begin_cell()
        self._loss_check.begin()
        self._division.begin_cell(may_depend_on_rank=may_depend_on_rank, is_on_some_ranks=is_on_some_ranks)
        self._shared_seeds.begin(None if may_depend_on_rank else entropy)
        is_divided = self._accelerator.components.data_world.size > 1
        self._divided_calls.is_on = is_divided and self._division.divides_models
        accelerator = self._accelerator
        world = accelerator.components.world
        writes_paths = is_on_some_ranks and world.rank == first_rank
        with ExitStack() as stack:
            stack.callback(self._functions.restore, namespace or {})
            if self._writes_once and not is_on_some_ranks:
                self._files.begin_cell(entropy)
            self._replace_functions(stack, is_on_some_ranks=is_on_some_ranks)
            if self._writes_once and not writes_paths:
                self._files.replace_writes(stack, self._functions, is_on_some_ranks=is_on_some_ranks)
            if self._stepper.world.size > 1:
                stack.enter_context(sharded.collective_reads(accelerator.components.comm))
            for check in (_refuse_unprepared(accelerator), library_step_check(accelerator)):
                stack.callback(register_optimizer_step_pre_hook(check).remove)
            stack.enter_context(self._preparation.new_parts.recording())
            # After the step, whose closure may call backward.
            stack.callback(register_optimizer_step_post_hook(self._record_step).remove)
            stack.callback(self._calls.close)
            stack.callback(self._loss_check.end)
            stack.callback(self._end_division)
            stack.callback(self._preparation.pop_pending)
            try:
                yield
            finally:
                with self._files.writing_for_cell():
                    at_end()
        self.last_share = self._stepper.window.share
        if self._stepper.window.has_unequal_shares:
            self._stepper.window.has_unequal_shares = False
            warn_unequal_shares(self._accelerator)
        self._stepper.window.set_share(None)
        if self._passes.has_unused_gradients and not self._accelerator.has_whole_gradients:
            warn_gradients_left(self._accelerator)

    def _prepare_jointly(self, objects: Sequence[Any]) -> list[Any]:
        batch = self._accelerator.resolved.config.batch or "global"
        return self._accelerator.prepare_jointly(objects, batch=batch, loops=self._loops)

    def _replace_functions(self, stack: ExitStack, *, is_on_some_ranks: bool) -> None:
        accelerator = self._accelerator
        map_device, clip = make_device_mapping(accelerator.device), (torch.nn.utils, torch.nn.utils.clip_grad)
        functions, replace = self._functions, self._functions.replace
        replace((Tensor,), "backward", self._passes.wrap_method)
        replace((torch.autograd,), "backward", self._passes.wrap_function)
        replace(
            (Tensor,), "register_hook", functools.partial(replace_register_hook, self._loss_check, self._divided_calls)
        )
        if self._divided_calls.is_on:
            replace((torch.autograd,), "grad", self._passes.wrap_grad)
            replace((Tensor,), "retain_grad", self._divided_calls.related.replace_retain_grad)
        replace((Optimizer,), "__init__", self._preparation.wrap_optimizer_init)
        replace((Optimizer,), "add_param_group", self._preparation.wrap_add_param_group)
        replace((DataLoader,), "__iter__", self._loops.wrap_loader_iter)
        replace(clip, "clip_grad_norm_", functools.partial(replace_clip_norm, accelerator))
        replace(clip, "clip_grad_value_", functools.partial(replace_clip_value, accelerator))
        replace((Tensor, nn.Module), "to", functools.partial(replace_to, map_device))
        replace((Tensor, nn.Module), "cuda", functools.partial(replace_cuda, accelerator.device))
        if (strategy := self._stepper.strategy).capabilities.shards_params:
            components = accelerator.components
            comm, mesh = components.comm, components.groups.mesh
            sharded_code.adapt_to_sharding(
                stack, replace, comm, mesh, strategy.check_graph_can_be_kept, is_on_some_ranks=is_on_some_ranks
            )
        self._held_gradients.replace_functions(stack, replace)
        collect_factories()
        factories = [replace((torch,), name, functools.partial(replace_factory, map_device)) for name in FACTORIES]
        for name in METHODS:
            replace((Tensor,), name, functools.partial(replace_factory, map_device))
        stack.enter_context(torchscript.compile_replacements_as_torch(list(chain(*factories))))
        functions.replace_all(torchscript.replacements())
        if self._stepper.world.size > 1:
            replace((Tensor,), "data", self._gradient_data.make_property)
            functions.replace_all(
                metric_gathering.replacements(
                    self._gathers_metrics, self._is_for_one_process, writes_once=lambda: self._writes_once
                )
            )
            functions.replace_all(self._shared_seeds.replacements())
        # Otherwise ranks may read different samples, or only some ranks run the cell.
        if self._writes_once and self._division.mode != "data" and not is_on_some_ranks:
            self._files.replace_commands(stack, functions)

    def _prepared_parameters(self) -> Iterator[nn.Parameter]:
        # Reads `_parameters`: in a sharded model `parameters()` may gather them, a collective of all ranks.
        parts = (part for model in self._stepper.bundle.models for part in model.modules())
        return (value for part in parts for value in part._parameters.values() if value is not None)

    def _gathers_metrics(self) -> bool:
        """Return whether libraries must gather metrics: ranks have read shares, or a library trains."""
        libraries = metric_gathering.METRIC_LIBRARIES
        if self._division.has_read_both and any(name in sys.modules for name in libraries):
            warn_gathered_counts(self._accelerator)
            self._division.has_read_both = False
        return self._division.has_read_shares or is_run_by_library(self._namespace, besides=libraries)

    def _is_for_one_process(self, module: str) -> bool:
        """Return whether a module is the user's, in a cell whose code does not read its rank."""
        return self._writes_once and is_user_module(module)

    def _end_division(self) -> None:
        self._division.end_cell()
        self._divided_calls.is_on = False

    def _handle_unequal_calls(self, name: str) -> None:
        """Stop dividing models for the rest of the cell, since the ranks compute different values; all ranks call."""
        self._divided_calls.is_on = False
        warn_unequal_values(self._accelerator, name)

    def _check_before_backward(self, loss: Tensor, problem: str | None) -> None:
        # Rank 0 also checks each kind of loss when it occurs first; the other checks run on all ranks together.
        is_on_all_ranks, self._passes.needs_check = self._passes.needs_check, False
        if self._preparation.is_called_by_cell():  # a library's trainer decides how its training is distributed
            self._preparation.prepare_new_optimizers()
        self._preparation.report_once()
        self._loops.check_before_backward()
        stepper = self._stepper
        has_whole_batch = self._divided_calls.is_on and not stepper.window.is_divided and not stepper.has_rank_rng
        is_compared = is_on_all_ranks and has_whole_batch and stepper.bundle.models
        if is_compared:
            with self._loss_check.paused():
                is_equal = self._divided_calls.has_equal_values([loss])
            if not is_equal:
                self._handle_unequal_calls("the loss")
        self._loss_check.check_loss(loss, problem)

    def _record_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._passes.has_unused_gradients = False
        self._preparation.record_step(optimizer)


def _refuse_unprepared(accelerator: Accelerator) -> Callable[..., None]:
    """Return a hook that raises if an optimizer that is not prepared steps on one worker's share of a batch."""
    stepper = accelerator.components.stepper

    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        is_alone = stepper.world.size == 1 or not stepper.window.is_divided
        if is_alone or id(optimizer) in stepper.optimizer_proxies:
            return
        if any(proxy.is_stepping for proxy in stepper.optimizer_proxies.values()):
            return  # the step of a prepared optimizer calls this one
        raise UnsyncedGradientError(
            f"this {type(optimizer).__name__} was made where the cell's preparation does not find its model, and steps "
            f"on one worker's share of a batch: the weights of {stepper.world.size} workers would diverge. Bind model "
            "and optimizer to names of the cell, or of the function that trains them, or call "
            "accelerator.prepare(model, optimizer) where they are made"
        )

    return hook
