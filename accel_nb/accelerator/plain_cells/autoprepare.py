"""Plain cells: detection of the objects to prepare, and replacement of functions of torch while a cell runs."""

from __future__ import annotations

import functools
import gc
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import BatchSampler, DataLoader

from accel_nb.accelerator.core import Accelerator
from accel_nb.accelerator.model_division.divided_calls import DividedCalls
from accel_nb.accelerator.plain_cells.cell_warnings import (
    library_step_check,
    warn_evaluation_mode,
    warn_gathered_counts,
    warn_gradients_left,
    warn_rows_differ,
    warn_tensors_without_module,
    warn_undivided_loader,
    warn_unequal_shares,
    warn_unequal_values,
    warn_unprepared_model,
)
from accel_nb.accelerator.plain_cells.detection.external_division import is_divided_loader, without_divided
from accel_nb.accelerator.plain_cells.detection.lazy_models import LazyModels
from accel_nb.accelerator.plain_cells.detection.model_hooks import has_inner_hooks
from accel_nb.accelerator.plain_cells.detection.module_calls import ModuleCallHooks
from accel_nb.accelerator.plain_cells.detection.new_parts import NewParts
from accel_nb.accelerator.plain_cells.detection.object_graph import find_training_objects
from accel_nb.accelerator.plain_cells.detection.training_detection import find_training_code
from accel_nb.accelerator.plain_cells.detection.unmanaged_tensors import find_unmanaged_names
from accel_nb.accelerator.plain_cells.files import file_writes
from accel_nb.accelerator.plain_cells.files.changed_paths import ChangedPaths
from accel_nb.accelerator.plain_cells.files.library_files import LIBRARIES
from accel_nb.accelerator.plain_cells.files.shared_commands import SharedCommands
from accel_nb.accelerator.plain_cells.loop_division import LoopDivision
from accel_nb.accelerator.plain_cells.loss_proof.proof import LossCheck
from accel_nb.accelerator.plain_cells.replacements import sharded_code, torchscript
from accel_nb.accelerator.plain_cells.replacements.backward_passes import BackwardPasses
from accel_nb.accelerator.plain_cells.replacements.clipping import replace_clip_norm, replace_clip_value
from accel_nb.accelerator.plain_cells.replacements.device_moves import (
    FACTORIES,
    METHODS,
    collect_factories,
    make_mover,
    replace_cuda,
    replace_factory,
    replace_to,
)
from accel_nb.accelerator.plain_cells.replacements.fresh_seeds import FreshSeeds
from accel_nb.accelerator.plain_cells.replacements.gradient_data import GradientData
from accel_nb.accelerator.plain_cells.replacements.held_gradients import HeldGradients
from accel_nb.accelerator.plain_cells.replacements.imported_names import ImportedNames
from accel_nb.accelerator.plain_cells.replacements.late_imports import observed_imports
from accel_nb.accelerator.prepare.preparer import ObjectsByKind, WholeReading
from accel_nb.data.loader import is_sharded
from accel_nb.data.order import BatchShare
from accel_nb.errors import UnsyncedGradientError
from accel_nb.runtime.distributed import metric_gathering, sharded
from accel_nb.runtime.process.user_code import cell_frames, is_called_by_user, is_run_by_library, is_user_module
from accel_nb.runtime.tensors.stepped import stepped_parameters

_INHERITED = object()


@dataclass(frozen=True)
class UnpreparedObjects:
    """Objects of a cell that can be prepared and are not yet: root modules only, without duplicates."""

    modules: tuple[nn.Module, ...] = ()
    optimizers: tuple[Optimizer, ...] = ()
    schedulers: tuple[LRScheduler, ...] = ()
    loaders: tuple[DataLoader[Any], ...] = ()

    @property
    def objects(self) -> tuple[Any, ...]:
        """All objects, in the order of preparation."""
        return (*self.modules, *self.optimizers, *self.schedulers, *self.loaders)


def release_unreachable(accelerator: Accelerator, namespace: dict[str, Any], within: Iterable[Any] = ()) -> None:
    """Release prepared objects that neither the notebook nor ``within`` references, such as the model of a past run."""
    objects = accelerator.prepared_objects
    if not objects:
        return
    reachable = {id(item) for item in chain(find_training_objects(list(namespace.values())), within)}
    reachable |= {id(item.optimizer) for item in objects if isinstance(item, LRScheduler) and id(item) in reachable}
    unreachable = [item for item in objects if id(item) not in reachable]
    accelerator.components.preparer.release(unreachable)
    has_cycles = any(isinstance(item, nn.Module) for item in unreachable)
    del objects, unreachable
    if has_cycles and accelerator.components.stepper.strategy.capabilities.shards_params:
        gc.collect()  # what `fully_shard` adds to a model refers to it


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
        self._pending: dict[int, Optimizer] = {}
        self._calls = ModuleCallHooks()
        self._loss_check = LossCheck(accelerator, self._calls)
        # The ids of the objects that the current cell uses, which its receipt lists.
        self._used: set[int] = set()
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
        self._division = LoopDivision(accelerator, self._divided_calls, self._used)
        # Whether an object was prepared that no name of the notebook references.
        self._has_unnamed_objects = False
        self._is_reported = True
        self._has_undivided_loop = False
        # By code and loader: the current loop, if it began in evaluation mode, and all such loops that called backward.
        self._evaluation_loop: tuple[types.CodeType, int] | None = None
        self._trains_in_evaluation_mode: set[tuple[types.CodeType, int]] = set()
        # The names of the current cell; and by location of a loop, the names of tensors in no module that it trains.
        self._names: tuple[str, ...] = ()
        self._unmanaged_names: dict[Any, list[str]] = {}
        # Tensors of earlier cells whose names the current cell rebinds.
        self._stale_tensors: list[weakref.ref[Tensor]] | None = None
        self._passes = BackwardPasses(self._stepper, self._divided_calls, self._loss_check, self._check_before_backward)
        # By owner, name and function of torch: what replaces it while a cell runs.
        self._replacements: dict[tuple[Any, str, Any], Any] = {}
        # By owner and name: what the owner itself had before; `_INHERITED` for a function of its base.
        self._replaced: list[tuple[Any, str, Any]] = []
        self._imported = ImportedNames()
        self._files = file_writes.PrivateFiles()
        self._shared_files = file_writes.SharedFiles()
        self._changed_paths: ChangedPaths | None = None
        self._commands = SharedCommands(components.comm, self._files)
        self._fresh_seeds = FreshSeeds()
        self._lazy_models = LazyModels(accelerator)
        self._gradient_data = GradientData(self._prepared_parameters, components.strategy.is_gathered)
        self._held_gradients = HeldGradients(self._stepper)
        self._writes_once = False
        self._new_parts = NewParts()

    def prepare(self, namespace: dict[str, Any], names: Iterable[str], bound: Iterable[str] = ()) -> UnpreparedObjects:
        """Prepare, jointly, the objects that a cell's names reference, once there is an optimizer; return them.

        A loader's batch is the global batch unless the options set another meaning, and is divided only in loops that
        train. Prepared objects that are no longer referenced are released. Every rank must call, with the same names.
        ``bound`` are the names that the cell binds before it reads them: until then they have values of earlier cells.
        """
        if self._stale_tensors is None:
            self._stale_tensors = [
                weakref.ref(namespace[name]) for name in bound if isinstance(namespace.get(name), Tensor)
            ]
        self._namespace = self._stepper.namespace = namespace
        self._names = tuple(names)
        self._imported.apply(namespace)
        self._lazy_models.begin_statement()
        self._release_unreachable(())
        objects = list(find_training_objects(namespace[name] for name in self._names if name in namespace))
        self._used.update(map(id, objects))
        found = self._unprepared(objects)
        has_optimizers = self._accelerator.has_optimizers
        is_needed = bool(found.optimizers or (has_optimizers and (found.loaders or found.schedulers)))
        if is_needed or self._new_parts.may_exist or self._stepper.is_outdated():
            self._accelerator.components.preparer.refresh()  # visits all modules, which takes long in a large model
        if is_needed:
            self._prepare(found.objects)
        self._new_parts.may_exist = False
        return found if is_needed else UnpreparedObjects()

    @contextmanager
    def run_cell(
        self,
        *,
        may_depend_on_rank: bool = False,
        is_partial: bool = False,
        entropy: int | None = None,
        at_end: Callable[[], object] = lambda: None,
    ) -> Iterator[None]:
        """Replace functions of torch while the block runs, so that code for one device runs on many workers.

        ``loss.backward()`` calls the accelerator's backward, gradient clipping averages gradients first, and the device
        ``cuda`` is the device of this worker. Unless the cell ``may_depend_on_rank``, models are divided, rank
        0's version of a file that every rank writes is kept, and generators without a seed get the same seed
        on all ranks, which pass the same ``entropy``.
        A cell that ``is_partial`` runs on some ranks only. The replacements apply to the whole process until the block
        ends.
        ``at_end`` is called last; files that it writes are the cell's.
        """
        self._writes_once = self._stepper.world.size > 1 and not may_depend_on_rank
        self._is_reported, self._has_undivided_loop, self._passes.needs_check = False, False, True
        self._evaluation_loop = self.last_share = None
        self._passes.has_unused_gradients = False
        self._used.clear()
        self._unmanaged_names.clear()
        self._stale_tensors = None
        self._loss_check.begin()
        self._division.begin_cell(may_depend_on_rank=may_depend_on_rank)
        self._fresh_seeds.begin(None if may_depend_on_rank else entropy)
        is_divided = self._accelerator.components.data_world.size > 1
        self._divided_calls.is_on = is_divided and self._division.divides_models
        accelerator = self._accelerator
        with ExitStack() as stack:
            stack.callback(self._imported.restore)
            stack.callback(self._restore_functions)
            if self._writes_once and not is_partial:
                self._begin_changed_paths(entropy)
            self._replace_functions(stack, None if is_partial else self._changed_paths)
            if self._stepper.world.size > 1:
                stack.enter_context(sharded.collective_reads(accelerator.components.comm))
            for check in (_refuse_unprepared(accelerator), library_step_check(accelerator)):
                stack.callback(register_optimizer_step_pre_hook(check).remove)
            stack.enter_context(self._new_parts.recording())
            # After the step, whose closure may call backward.
            stack.callback(register_optimizer_step_post_hook(self._record_step).remove)
            stack.callback(self._calls.close)
            stack.callback(self._loss_check.end)
            stack.callback(self._end_division)
            stack.callback(lambda: self._forget_pending(list(self._pending.values())))
            try:
                yield
            finally:
                with self._files_of_rank.writing_for_cell():
                    at_end()
        self.last_share = self._stepper.window.share
        if self._stepper.window.has_unequal_shares:
            self._stepper.window.has_unequal_shares = False
            warn_unequal_shares(self._accelerator)
        self._stepper.window.set_share(None)
        if self._passes.has_unused_gradients and not self._accelerator.has_whole_gradients:
            warn_gradients_left(self._accelerator)

    @property
    def _files_of_rank(self) -> file_writes.SharedFiles | file_writes.PrivateFiles:
        return self._shared_files if self._stepper.world.is_main else self._files

    def _begin_changed_paths(self, entropy: int | None) -> None:
        if self._changed_paths is None:
            self._changed_paths = ChangedPaths(self._accelerator.components.comm)
        self._changed_paths.begin(entropy or 0)

    def _replace_functions(self, stack: ExitStack, changed: ChangedPaths | None) -> None:
        accelerator = self._accelerator
        move, clip = make_mover(accelerator.device), (torch.nn.utils, torch.nn.utils.clip_grad)
        replace = self._replace
        replace((Tensor,), "backward", self._passes.wrap_method)
        replace((torch.autograd,), "backward", self._passes.wrap_function)
        replace((Tensor,), "register_hook", self._wrap_register_hook)
        if self._divided_calls.is_on:
            replace((torch.autograd,), "grad", self._passes.wrap_grad)
            replace((Tensor,), "retain_grad", self._divided_calls.related.replace_retain_grad)
        replace((Optimizer,), "__init__", self._wrap_optimizer_init)
        replace((Optimizer,), "add_param_group", self._wrap_add_param_group)
        replace((DataLoader,), "__iter__", self._wrap_loader_iter)
        replace(clip, "clip_grad_norm_", functools.partial(replace_clip_norm, accelerator))
        replace(clip, "clip_grad_value_", functools.partial(replace_clip_value, accelerator))
        replace((Tensor, nn.Module), "to", functools.partial(replace_to, move))
        replace((Tensor, nn.Module), "cuda", functools.partial(replace_cuda, accelerator.device))
        if (strategy := self._stepper.strategy).capabilities.shards_params:
            components = accelerator.components
            sharded_code.adapt_to_sharding(stack, replace, components.comm, components.groups.mesh, strategy.keep_graph)
        self._held_gradients.replace_functions(stack, replace)
        collect_factories()
        factories = [replace((torch,), name, functools.partial(replace_factory, move)) for name in FACTORIES]
        for name in METHODS:
            replace((Tensor,), name, functools.partial(replace_factory, move))
        stack.enter_context(torchscript.compile_replacements_as_torch(list(chain(*factories))))
        for owner, name, make in torchscript.replacements():
            replace((owner,), name, make)
        if self._stepper.world.size > 1:
            replace((Tensor,), "data", self._gradient_data.make_property)
            metrics = metric_gathering.replacements(self._gathers_metrics, self._is_for_one_process)
            for owner, name, make in chain(metrics, self._fresh_seeds.replacements()):
                replace((owner,), name, make)
        if self._writes_once:
            files = self._files_of_rank
            files.begin(changed)
            stack.callback(files.discard)
            for owner, name, make in file_writes.replacements(files):
                replace((owner,), name, make)
            stack.enter_context(observed_imports(LIBRARIES, functools.partial(self._replace_library, files)))
        if self._writes_once and self._division.mode != "data":  # else the samples that ranks read may differ
            stack.enter_context(self._commands.shared())
            for owner, name, make in self._commands.replacements():
                replace((owner,), name, make)

    def _replace_library(self, files: file_writes.SharedFiles | file_writes.PrivateFiles) -> None:
        """Replace the functions of a library that the cell has imported, as those of the others at its start."""
        replaced = {(owner, name) for owner, name, _ in self._replaced}
        for owner, name, make in file_writes.library_replacements(files):
            if (owner, name) not in replaced:
                self._replace((owner,), name, make)

    def _replace(self, owners: Sequence[Any], name: str, make: Callable[[Any], Any]) -> list[tuple[Any, Any]]:
        """Replace a function by ``make(function)`` until the cell ends, and return both for each owner."""
        pairs: list[tuple[Any, Any]] = []
        for owner in owners:
            original = getattr(owner, name)
            self._imported.add(original, owner, name)
            replacement = self._replacements.get((owner, name, original))
            if replacement is None:
                replacement = self._replacements[owner, name, original] = make(original)
            pairs.append((original, replacement))
            self._replaced.append((owner, name, vars(owner).get(name, _INHERITED)))
            setattr(owner, name, replacement)
        return pairs

    def _restore_functions(self) -> None:
        while self._replaced:
            owner, name, own = self._replaced.pop()
            if own is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, own)

    def is_training(self) -> bool:
        """Return whether gradients are enabled, and a model that an optimizer steps is in training mode."""
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
            reading = self._division.reading_of(loader)
        if preparer.record_division(loader, reading):
            self._accelerator.report(self._used)
        if code is None:
            return False
        return preparer.begin_epoch(reads_shares=reading is None)

    def whole_reading(self, loader: DataLoader[Any]) -> WholeReading | None:
        """Return how the batches of a loader that every rank reads whole are computed; None if ranks read shares."""
        return self._division.reading_of(loader)

    def wrap_forward(self, model: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any] | None:
        """Return a forward that divides its rows among the ranks; None to leave that of a model without tensors."""
        has_tensors = any(True for _ in chain(model.parameters(), model.buffers()))
        is_alone = self._accelerator.components.data_world.size == 1
        if is_alone or not has_tensors or isinstance(model, torch.jit.ScriptModule):
            return None
        return self._divided_calls.wrap_forward(model, forward)

    def _training_code(self, loader: DataLoader[Any]) -> types.CodeType | None:
        """Return the code of a loop that trains with the batches of ``loader``; None if every rank reads all of it."""
        if not torch.is_grad_enabled() or self._division.mode == "none":
            return None
        found = None if self._stepper.computes_alone() else find_training_code()
        if found is None:
            self._has_undivided_loop = self._passes.needs_check = True
            return None
        window = self._stepper.window
        if window.size > 1 and not window.averages_each_batch:
            # Code that reads or changes gradients within a window must find those of all ranks.
            window.averages_each_batch = found.reads_gradients()
        self._prepare_new_optimizers(loader)
        is_untraced = not self._division.divides_models and self._may_evaluate(found.code, loader)
        has_unmanaged = self._trains_unmanaged_tensors()
        if has_unmanaged:
            self._divided_calls.is_on = False  # a model's code may use these tensors, whose gradients are not averaged
        if has_unmanaged or is_untraced or not _has_batches(loader):
            self._read_undivided()
            return None
        return found.code

    def _prepared_parameters(self) -> Iterator[nn.Parameter]:
        # Reads `_parameters`: in a sharded model `parameters()` may gather them, a collective of all ranks.
        parts = (part for model in self._stepper.bundle.models for part in model.modules())
        return (value for part in parts for value in part._parameters.values() if value is not None)

    def _gathers_metrics(self) -> bool:
        """Return whether ranks have metrics of shares; a library's trainer decides by itself what its ranks read."""
        libraries = metric_gathering.METRIC_LIBRARIES
        if self._division.has_read_both and any(name in sys.modules for name in libraries):
            warn_gathered_counts(self._accelerator)
            self._division.has_read_both = False
        return self._division.has_read_shares or is_run_by_library(self._namespace, besides=libraries)

    def _is_for_one_process(self, module: str) -> bool:
        """Return whether a module is the user's, in a cell whose code does not ask for its rank."""
        return self._writes_once and is_user_module(module)

    def _end_division(self) -> None:
        self._division.end_cell()
        self._divided_calls.is_on = False

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
        self._division.make_rng_equal()

    def _trains_unmanaged_tensors(self) -> bool:
        """Return whether the cell trains tensors that are in no module, whose gradients are not averaged.

        Searches once for each location, when a loop starts, so tensors that are made inside of the loop are not found.
        """
        if self._stepper.strategy.capabilities.shards_params:
            return False  # a list may reference parameters from before the strategy sharded them
        frames = list(cell_frames(self._namespace))
        location = tuple((frame.f_code, frame.f_lineno) for frame in frames)
        if location not in self._unmanaged_names:
            names = {name: self._namespace[name] for name in self._names if name in self._namespace}
            for frame in frames:
                names |= frame.f_locals if frame.f_globals is not frame.f_locals else {}
            stale = [ref() for ref in self._stale_tensors or ()]
            names = {name: value for name, value in names.items() if not any(value is item for item in stale)}
            found = self._unmanaged_names[location] = find_unmanaged_names(names, self._stepper.averaged_parameters)
            if found:
                warn_tensors_without_module(self._accelerator, found)
        return bool(self._unmanaged_names[location])

    def _unprepared(self, objects: Iterable[Any]) -> UnpreparedObjects:
        prepared = self._accelerator.components.preparer
        objects = list(objects)
        needed = [*objects, *(item.optimizer for item in objects if isinstance(item, LRScheduler))]
        if all(item in prepared for item in needed):
            return UnpreparedObjects()
        kinds = ObjectsByKind.sort(self._lazy_models.without(without_divided(objects)))
        known = set(map(id, kinds.optimizers))
        scheduled = {id(scheduler.optimizer): scheduler.optimizer for scheduler in kinds.schedulers}
        optimizers = [*kinds.optimizers, *(item for key, item in scheduled.items() if key not in known)]
        inside = {id(part) for model in kinds.models for part in model.modules() if part is not model}
        stepped = {
            id(value) for item in (*optimizers, *self._stepper.bundle.optimizers) for value in stepped_parameters(item)
        }
        roots = [model for model in kinds.models if id(model) not in inside and model not in prepared]
        return UnpreparedObjects(
            modules=tuple(model for model in roots if not _is_untrained_meta_model(model, stepped)),
            optimizers=tuple(item for item in optimizers if item not in prepared),
            schedulers=tuple(item for item in kinds.schedulers if item not in prepared),
            loaders=tuple(item for item in kinds.loaders if item not in prepared),
        )

    def _prepare(self, objects: Sequence[Any]) -> None:
        self._forget_pending(objects)
        new = self._accelerator.prepare_jointly(
            objects, batch=self._accelerator.resolved.config.batch or "global", loops=self
        )
        self._used.update(map(id, new))
        if new:
            self._is_reported = True
            self._accelerator.report(self._used)

    def _release_unreachable(self, within: Iterable[Any]) -> None:
        """Release prepared objects that neither the notebook nor ``within`` references."""
        release_unreachable(self._accelerator, self._namespace, within)

    def _prepare_new_optimizers(self, *iterated: DataLoader[Any]) -> None:
        """Prepare the optimizers that were made since the last call, with the models that own their parameters.

        ``iterated`` are loaders that are being iterated; possibly no name references them.
        """
        if not (self._pending or self._has_unnamed_objects):
            return
        if self._pending:  # a new optimizer may step layers that a model did not have
            self._accelerator.components.preparer.refresh()
        pending = self._forget_pending(list(self._pending.values()))
        local = (value for frame in cell_frames(self._namespace) for value in list(frame.f_locals.values()))
        within = list(find_training_objects(local))
        self._release_unreachable([*within, *pending, *iterated])
        found = self._unprepared([*within, *pending])
        stepped = {id(value) for optimizer in found.optimizers for value in stepped_parameters(optimizer)}
        owners = [model for model in found.modules if any(id(value) in stepped for value in model.parameters())]
        owned = {id(value) for model in owners for value in model.parameters()} | self._stepper.averaged_parameters
        optimizers = [
            item for item in found.optimizers if any(id(value) in owned for value in stepped_parameters(item))
        ]
        steps = {id(item) for item in optimizers} | self._stepper.optimizer_proxies.keys()
        schedulers = [item for item in found.schedulers if id(item.optimizer) in steps]
        found_here = {id(item) for item in found.optimizers} - {id(item) for item in optimizers}
        alone = [item for item in pending if id(item) in found_here]
        # A tensor in no module has the same gradient on all ranks, as all that is computed outside of models.
        if any(isinstance(value, nn.Parameter) for item in alone for value in stepped_parameters(item)):
            warn_unprepared_model(self._accelerator)
        if optimizers or schedulers:
            self._has_unnamed_objects = True
            self._prepare([*owners, *optimizers, *schedulers])

    def _forget_pending(self, objects: Iterable[Any]) -> list[Optimizer]:
        forgotten = [item for item in objects if self._pending.pop(id(item), None) is not None]
        for optimizer in forgotten:
            vars(optimizer).pop("zero_grad", None)
        if not self._pending:
            self._calls.set_before(None)
        return forgotten

    def _prepare_pending(self) -> None:
        """Prepare pending optimizers when the user's code calls a module.

        Preparation may replace weights, and an autograd graph must not reference the old ones. Models that a library's
        trainer calls are not prepared, even in the user's code: the trainer decides how its training is distributed.
        """
        if self._pending and self._is_called_by_cell() and not is_run_by_library(self._namespace):
            self._prepare_new_optimizers()

    def _is_called_by_cell(self) -> bool:
        return is_called_by_user() and not self._stepper.computes_alone()

    def _handle_unequal_calls(self, name: str) -> None:
        """Stop dividing models for the rest of the cell, since the ranks compute different values; all ranks call."""
        self._divided_calls.is_on = False
        warn_unequal_values(self._accelerator, name)

    def _check_before_backward(self, loss: Tensor, problem: str | None) -> None:
        # Rank 0 also checks each kind of loss when it occurs first; the other checks run on all ranks together.
        is_on_all_ranks, self._passes.needs_check = self._passes.needs_check, False
        if self._is_called_by_cell():  # a library's trainer decides how its training is distributed
            self._prepare_new_optimizers()
        stepper = self._stepper
        if not self._is_reported and stepper.bundle.models:
            self._is_reported = True
            self._accelerator.report(self._used)
        if self._evaluation_loop is not None:
            self._trains_in_evaluation_mode.add(self._evaluation_loop)
            self._evaluation_loop = None
            warn_evaluation_mode(self._accelerator)
        if self._has_undivided_loop and stepper.bundle.models:
            self._has_undivided_loop = False
            if self._accelerator.components.preparer.undivided_batch.is_current(stepper.window.share):
                stepper.window.set_share(None)  # the share belongs to an earlier loop that was left
            if stepper.window.share is None and not self._divided_calls.is_on:
                warn_undivided_loader(self._accelerator)
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

    def _wrap_register_hook(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a ``Tensor.register_hook`` that records calls by the user's code, not those by torch."""

        @functools.wraps(original)
        def register_hook(tensor: Tensor, hook: Callable[[Tensor], Any]) -> Any:
            if is_user_module(sys._getframe(1).f_globals.get("__name__")):
                self._loss_check.record_hook()
                if tensor.is_leaf:
                    self._divided_calls.clear_layouts()
            return self._divided_calls.related.register_hook(original, tensor, hook)

        return register_hook

    def _wrap_optimizer_init(self, original: Callable[..., None]) -> Callable[..., None]:
        """Return an optimizer's constructor that registers the optimizer, so that it is prepared at its first use."""

        @functools.wraps(original)
        def construct(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            self._pending[id(optimizer)] = optimizer
            self._passes.needs_check = True
            self._calls.set_before(self._prepare_pending)

            def zero_grad(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
                if self._is_called_by_cell():
                    self._prepare_new_optimizers()
                else:
                    self._forget_pending([optimizer])
                return optimizer.zero_grad(*args, **kwargs)

            vars(optimizer)["zero_grad"] = types.MethodType(zero_grad, optimizer)

        return construct

    def _wrap_add_param_group(self, original: Callable[..., None]) -> Callable[..., None]:
        """Return a method that also prepares again models with new layers, whose parameters a group may hold."""

        @functools.wraps(original)
        def add(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            if optimizer in self._accelerator.components.preparer:
                self._accelerator.components.preparer.refresh()

        return add

    def _wrap_loader_iter(self, original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        """Return an ``__iter__`` that shards a loader that no name of the cell references, if the loop trains."""

        @functools.wraps(original)
        def __iter__(loader: DataLoader[Any]) -> Iterator[Any]:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            is_ours = (
                is_sharded(loader)
                or is_divided_loader(loader)
                or caller.startswith("accel_nb.")
                or type(loader).__iter__ is not __iter__
            )
            if not is_ours and (self._pending or self._accelerator.has_optimizers) and self.begin_loop(loader):
                self._prepare([loader])
                return iter(loader)
            return original(loader)

        return __iter__


def _is_untrained_meta_model(model: nn.Module, stepped: Collection[int]) -> bool:
    """Return whether a model is on the meta device and not trained, as one that `torch.func` calls with weights."""
    values = list(model.parameters())
    return any(value.is_meta for value in values) and not any(id(value) in stepped for value in values)


def _has_batches(loader: DataLoader[Any]) -> bool:
    """Return whether a loader yields batches: without a batch sampler its items may be single samples."""
    return loader.batch_sampler is not None or isinstance(loader.sampler, BatchSampler)


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
