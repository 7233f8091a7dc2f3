"""Preparation of the objects that a plain cell trains: named ones before a statement, others at their first use."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from accel_nb.accelerator.core import Accelerator
from accel_nb.accelerator.plain_cells.cell_warnings import warn_unprepared_model
from accel_nb.accelerator.plain_cells.detection.lazy_models import LazyModels
from accel_nb.accelerator.plain_cells.detection.module_calls import ModuleCallHooks
from accel_nb.accelerator.plain_cells.detection.new_parts import NewParts
from accel_nb.accelerator.plain_cells.detection.object_graph import find_training_objects
from accel_nb.accelerator.plain_cells.detection.unprepared_objects import UnpreparedObjects, find_unprepared
from accel_nb.accelerator.plain_cells.replacements.backward_passes import BackwardPasses
from accel_nb.accelerator.plain_cells.unreachable_objects import release_unreachable
from accel_nb.runtime.process.user_code import calling_packages, cell_frames, is_called_by_user
from accel_nb.runtime.tensors.stepped import stepped_parameters


class Preparation:
    """Prepares objects jointly, by ``prepare_jointly``, which returns the new ones. Every rank must prepare the same.

    An optimizer that the cell makes is *pending* until it is prepared: when a module is called, a loader is iterated,
    gradients are cleared or a backward pass begins. If a library calls the module, or the code that does, it may be a
    trainer that distributes its training itself: then the optimizer is prepared once the user's code has stepped.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        calls: ModuleCallHooks,
        passes: BackwardPasses,
        prepare_jointly: Callable[[Sequence[Any]], Sequence[Any]],
    ) -> None:
        self._accelerator = accelerator
        self._stepper = accelerator.components.stepper
        self._calls = calls
        self._passes = passes
        self._prepare_jointly = prepare_jointly
        self.used: set[int] = set()
        """The ids of the objects that the current cell uses, which its receipt lists."""
        self.new_parts = NewParts()
        """Records, while a cell runs, whether prepared models may have got new parts."""
        self._namespace: dict[str, Any] = {}
        self._pending: dict[int, Optimizer] = {}
        # The ids of pending optimizers whose models a graph may reference: preparing would change weights of the graph.
        self._unstepped: set[int] = set()
        # Packages that have called models of the latter, and packages that leave the steps to the user's code.
        self._callers: set[str] = set()
        self._led_by_user: set[str] = set()
        # Whether an object was prepared that no name of the notebook references.
        self._has_unnamed_objects = False
        self._is_reported = True
        # Whether the cell runs on some ranks only: to prepare is a collective of all.
        self._is_on_some_ranks = False
        self._lazy_models = LazyModels(accelerator)

    def begin_cell(self, *, is_on_some_ranks: bool) -> None:
        """Reset for a new cell. With ``is_on_some_ranks`` only some ranks run the cell, and nothing is prepared."""
        self._is_reported, self._is_on_some_ranks = False, is_on_some_ranks
        self.used.clear()
        self._callers.clear()
        self._led_by_user.clear()

    def prepare_named(self, namespace: dict[str, Any], names: Iterable[str]) -> UnpreparedObjects:
        """Prepare the objects that names of a namespace reference, if there is an optimizer; return the new ones.

        Prepared objects that are no longer referenced are released.
        """
        self._namespace = namespace
        if self._is_on_some_ranks:
            return UnpreparedObjects()
        self._lazy_models.begin_statement()
        release_unreachable(self._accelerator, namespace)
        objects = list(find_training_objects(namespace[name] for name in names if name in namespace))
        self.used.update(map(id, objects))
        found = self._unprepared(objects)
        has_optimizers = self._accelerator.has_optimizers
        is_needed = bool(found.optimizers or (has_optimizers and (found.loaders or found.schedulers)))
        if is_needed or self.new_parts.may_exist or self._stepper.is_outdated():
            self._accelerator.components.preparer.refresh()  # visits all modules, which takes long in a large model
        if is_needed:
            self.prepare(found.objects)
        self.new_parts.may_exist = False
        return found if is_needed else UnpreparedObjects()

    def prepare(self, objects: Sequence[Any]) -> None:
        """Prepare objects, and show them in the receipt if any was not prepared before."""
        self._remove_pending(objects)
        new = self._prepare_jointly(objects)
        self.used.update(map(id, new))
        if new:
            self._is_reported = True
            self._accelerator.report(self.used)

    def report_once(self) -> None:
        """Show the receipt of a cell that trains and has prepared nothing itself, if it has not been shown."""
        if not self._is_reported and self._stepper.bundle.models:
            self._is_reported = True
            self._accelerator.report(self.used)

    def is_called_by_cell(self) -> bool:
        """Return whether the user's code makes the current call, in a thread in which ranks train together."""
        return is_called_by_user() and not self._stepper.computes_alone()

    def has_optimizers(self) -> bool:
        """Return whether an optimizer is prepared, or pending."""
        return bool(self._pending or self._accelerator.has_optimizers)

    def prepare_new_optimizers(self, *iterated: DataLoader[Any]) -> None:
        """Prepare the optimizers that were made since the last call, with the models that own their parameters.

        ``iterated`` are loaders that are being iterated; possibly no name references them.
        """
        if self._is_on_some_ranks or self._unstepped or not (self._pending or self._has_unnamed_objects):
            return
        if self._pending:  # a new optimizer may step layers that a model did not have
            self._accelerator.components.preparer.refresh()
        pending = self.pop_pending()
        local_values = (value for frame in cell_frames(self._namespace) for value in list(frame.f_locals.values()))
        local_objects = list(find_training_objects(local_values))
        release_unreachable(self._accelerator, self._namespace, [*local_objects, *pending, *iterated])
        found = self._unprepared([*local_objects, *pending])
        stepped = {id(value) for optimizer in found.optimizers for value in stepped_parameters(optimizer)}
        owners = [model for model in found.modules if any(id(value) in stepped for value in model.parameters())]
        owned = {id(value) for model in owners for value in model.parameters()} | self._stepper.averaged_parameters
        optimizers = [
            item for item in found.optimizers if any(id(value) in owned for value in stepped_parameters(item))
        ]
        steps = {id(item) for item in optimizers} | self._stepper.optimizer_proxies.keys()
        schedulers = [item for item in found.schedulers if id(item.optimizer) in steps]
        unowned = {id(item) for item in found.optimizers} - {id(item) for item in optimizers}
        alone = [item for item in pending if id(item) in unowned]
        # A tensor in no module has the same gradient on all ranks, as all that is computed outside of models.
        if any(isinstance(value, nn.Parameter) for item in alone for value in stepped_parameters(item)):
            warn_unprepared_model(self._accelerator)
        if optimizers or schedulers:
            self._has_unnamed_objects = True
            self.prepare([*owners, *optimizers, *schedulers])

    def record_step(self, optimizer: Optimizer) -> None:
        """Record a step of an optimizer: a pending one may be prepared at the next call of a module.

        A graph that references the weights of before the step cannot be used any more, on one device either.
        """
        if id(optimizer) not in self._unstepped:
            return
        self._unstepped.discard(id(optimizer))
        if self.is_called_by_cell() and not self._unstepped:
            self._led_by_user |= self._callers

    def pop_pending(self) -> list[Optimizer]:
        """Remove and return the pending optimizers."""
        return self._remove_pending(list(self._pending.values()))

    def wrap_optimizer_init(self, original: Callable[..., None]) -> Callable[..., None]:
        """Return an optimizer's constructor that registers the optimizer, so that it is prepared at its first use."""

        @functools.wraps(original)
        def construct(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            self._pending[id(optimizer)] = optimizer
            self._passes.needs_check = True
            self._calls.set_before(self._prepare_pending)

            def zero_grad(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
                if self.is_called_by_cell():
                    self.prepare_new_optimizers()
                else:
                    self._remove_pending([optimizer])
                if id(optimizer) in self._pending:  # prepared after its first step
                    return type(optimizer).zero_grad(optimizer, *args, **kwargs)
                return optimizer.zero_grad(*args, **kwargs)

            vars(optimizer)["zero_grad"] = types.MethodType(zero_grad, optimizer)

        return construct

    def wrap_add_param_group(self, original: Callable[..., None]) -> Callable[..., None]:
        """Return a method that also refreshes prepared models, whose new layers a parameter group may contain."""

        @functools.wraps(original)
        def add(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            if optimizer in self._accelerator.components.preparer:
                self._accelerator.components.preparer.refresh()

        return add

    def _unprepared(self, objects: Sequence[Any]) -> UnpreparedObjects:
        prepared, optimizers = self._accelerator.components.preparer, self._stepper.bundle.optimizers
        return find_unprepared(objects, prepared, optimizers, self._lazy_models)

    def _remove_pending(self, objects: Iterable[Any]) -> list[Optimizer]:
        dropped = [item for item in objects if self._pending.pop(id(item), None) is not None]
        for optimizer in dropped:
            vars(optimizer).pop("zero_grad", None)
            self._unstepped.discard(id(optimizer))
        if not self._pending:
            self._calls.set_before(None)
        return dropped

    def _prepare_pending(self) -> None:
        """Prepare pending optimizers when a module is called, unless a library calls it or the code that does.

        Preparation may replace weights, and an autograd graph must not reference the old ones. A library may be a
        trainer, which decides how its training is distributed.
        """
        if not self._pending or self._stepper.computes_alone():
            return
        packages = calling_packages(self._namespace)
        if packages <= self._led_by_user:
            self.prepare_new_optimizers()
        elif torch.is_grad_enabled():
            self._unstepped.update(self._pending)
            self._callers |= packages
