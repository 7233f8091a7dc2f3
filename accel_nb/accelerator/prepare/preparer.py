"""Preparation of models, optimizers, schedulers and loaders: each is changed in place, and restored on release."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from accel_nb.accelerator.prepare.activation_checkpointing import ActivationCheckpointer
from accel_nb.accelerator.prepare.compiling import Compiler, current_forward
from accel_nb.accelerator.prepare.parameter_order import align_parameters
from accel_nb.accelerator.process.seeding import synchronize_rng_states
from accel_nb.accelerator.state.run_observer import RunObserver
from accel_nb.accelerator.tracking.metrics import UndividedBatch
from accel_nb.accelerator.training.optimizer_proxy import (
    OptimizerProxy,
    average_metric,
    unwrap_scheduler,
    wrap_scheduler,
)
from accel_nb.accelerator.training.stepper import Stepper
from accel_nb.config.schema import Config
from accel_nb.data.loader import BatchSizeMeaning, shard_loader, unshard_loader
from accel_nb.data.stateful import replace_state_methods
from accel_nb.errors import MisuseError
from accel_nb.precision.forward import forward_in_precision
from accel_nb.precision.fp8 import Float8Layers
from accel_nb.precision.policy import Precision
from accel_nb.runtime import rng
from accel_nb.runtime.devices.registry import device_type
from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.runtime.distributed.sharded import full_shape
from accel_nb.runtime.tensors.instance_patching import plain_class, replace_forward, restore_forward
from accel_nb.runtime.tensors.nested import find_tensors, map_tensors
from accel_nb.runtime.tensors.tied import move_tied
from accel_nb.strategies.base import Bundle
from accel_nb.telemetry.validation_meter import ValidationLoop

_OWNERSHIP = "_accel_nb_claim"


@dataclass(frozen=True)
class Ownership:
    """The accelerator that prepared an object, and a function that restores the object if the accelerator is gone."""

    owner: weakref.ref[Any]
    release: Callable[[Any], object]


@dataclass
class ObjectsByKind:
    """Objects grouped by kind, since each kind is prepared differently."""

    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    schedulers: list[LRScheduler] = field(default_factory=list)
    loaders: list[DataLoader[Any]] = field(default_factory=list)
    others: list[Any] = field(default_factory=list)

    @classmethod
    def sort(cls, objects: Iterable[Any]) -> ObjectsByKind:
        """Group objects by kind, without duplicates."""
        kinds = cls()
        seen: set[int] = set()
        for item in objects:
            if id(item) in seen:
                continue
            seen.add(id(item))
            kinds._list_for(item).append(item)
        return kinds

    def outermost_models(self) -> list[nn.Module]:
        """Return the models that are not submodules of others."""
        inside = {id(part) for model in self.models for part in model.modules() if part is not model}
        return [model for model in self.models if id(model) not in inside]

    def _list_for(self, item: Any) -> list[Any]:
        if isinstance(item, nn.Module):
            return self.models
        if isinstance(item, Optimizer):
            return self.optimizers
        if isinstance(item, LRScheduler):
            return self.schedulers
        if isinstance(item, DataLoader):
            return self.loaders
        return self.others


@dataclass(frozen=True)
class WorkDivision:
    """The division of the work on whole batches: by rows (``computes_rows``), or not at all.

    ``text``, for the receipt, names the models that divide rows, or the reason why there are none.
    """

    computes_rows: bool
    text: str = ""


class LoopPolicy(Protocol):
    """Decides which loops over prepared loaders train, and how their batches are divided among ranks."""

    def is_training(self) -> bool:
        """Return whether a loop that starts now trains; the length of a loader depends on it."""
        ...

    def begin_loop(self, loader: DataLoader[Any]) -> bool:
        """Return whether the loop that starts over ``loader`` trains; if so, prepare for its first batch.

        Every rank must call.
        """
        ...

    def wrap_forward(self, model: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any] | None:
        """Return a function to call in place of a prepared model's ``forward``; None to leave that unchanged."""
        ...

    def describe_division(self, loader: DataLoader[Any]) -> WorkDivision | None:
        """Return how the work on whole batches of a loader is divided; None if ranks read shares."""
        ...


class TrainingLoops:
    """The policy of explicit code: every loop over a prepared loader trains and reads shares."""

    def __init__(self, preparer: Preparer) -> None:
        self._preparer = preparer

    def is_training(self) -> bool:
        """Return True."""
        return True

    def begin_loop(self, loader: DataLoader[Any]) -> bool:
        """Prepare for the first batch, and return True."""
        return self._preparer.begin_epoch()

    def wrap_forward(self, model: nn.Module, forward: Callable[..., Any]) -> None:
        """Return None: every rank reads a share, so models need no division."""

    def describe_division(self, loader: DataLoader[Any]) -> None:
        """Return None: every rank reads a share."""


class _LoopEvents:
    """Forwards events of loops over one loader. Called for each batch: its attributes are the callbacks themselves."""

    def __init__(
        self, loops: LoopPolicy, stepper: Stepper, undivided_batch: UndividedBatch, observer: RunObserver
    ) -> None:
        self._window = window = stepper.window
        self._meter = stepper.meter
        self._undivided_batch = undivided_batch
        self._validation = ValidationLoop(stepper.meter.validation) if stepper.meter.validation.is_on else None
        self.is_training = loops.is_training
        self.on_epoch_start = loops.begin_loop
        self.on_read = stepper.time_use.add_read
        self.on_share = window.set_share
        self.on_batch_end = observer.on_batch_end
        self.on_loop_start = observer.on_loop_start

    def num_trained(self) -> int:
        return self._window.num_trained

    def on_whole_batch(self, iterator: Iterator[Any] | None, num_samples: int | None) -> None:
        self._undivided_batch.record(iterator, self._window.share, num_samples)
        if self._validation is not None:
            losses = self._meter.loss_names
            self._validation.record(iterator, num_samples, self._window.num_trained, losses)
            if iterator is None:
                self._validation.finish(self._meter.run_step, losses)


class KeptLoaders(dict[int, DataLoader[Any]]):
    """The prepared loaders by id. Only the accelerator holds this dict; other references to loaders are weak."""


class Preparer:
    """Prepares the objects of one accelerator in place, and restores them when they are released.

    A prepared loader references the preparer, which has only a weak reference to the loader. So a loader is freed, with
    its worker processes, when neither it nor the accelerator, which has ``kept``, is referenced any more.
    """

    def __init__(
        self,
        owner: Any,
        kept: KeptLoaders,
        stepper: Stepper,
        comm: Communicator,
        device: torch.device,
        *,
        compiler: Compiler,
        checkpointer: ActivationCheckpointer,
        float8: Float8Layers | None = None,
        options: Config,
        moves_objects: bool = True,
        rng_types: Sequence[str] = (),
        observer: RunObserver,
    ) -> None:
        self._owner, self._kept = weakref.ref(owner), weakref.ref(kept)
        self._stepper = stepper
        self._comm = comm
        self._device = device
        self._compiler = compiler
        self._checkpointer = checkpointer
        self._float8 = float8
        self.schedule = options.schedule
        # The options of loaders that are prepared from now on.
        self.data = options.data
        self._seed = options.seed
        # Whether objects are moved to the device: the default, and exceptions by id.
        self._moves_objects = moves_objects
        self._placement_overrides: Mapping[int, bool] = {}
        self._rng_types = tuple(rng_types)
        self._observer = observer
        self.undivided_batch = UndividedBatch()
        # By id: functions that return the object, None if it was freed.
        self._objects: dict[int, Callable[[], Any]] = {}
        # By id: models in the run's precision that are not trained, also those that `drop_evaluated` has dropped.
        self._evaluated: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
        # Whether a schedule may have been computed from a loader's length before the loader was divided, so shortened.
        self.has_early_schedule = False
        # Whether a loader's batch is the batch of each worker.
        self._has_per_worker_batches = False
        # A description of each loader's batch, such as "batch 64 = 2 x 32", by the loader's id.
        self.batch_descriptions: dict[int, str] = {}
        # By model id: the policy that has replaced the forward that the strategy had set.
        self._call_policies: dict[int, LoopPolicy] = {}
        # The loaders that every rank reads whole, by id.
        self.whole_loaders: dict[int, WorkDivision] = {}

    def __contains__(self, item: object) -> bool:
        found = self._objects.get(id(item))
        return found is not None and found() is item

    @property
    def objects(self) -> list[Any]:
        """All prepared objects, in the order of preparation."""
        found = [get() for get in self._objects.values()]
        return [item for item in found if item is not None]

    def epoch_lengths(self) -> list[int]:
        """Return the number of batches that this rank reads from each loader of known length in an epoch."""
        lengths = [known_length(item) for item in self.objects if isinstance(item, DataLoader)]
        return [length for length in lengths if length is not None]

    def prepare(
        self,
        objects: Sequence[Any],
        *,
        batch: BatchSizeMeaning,
        loops: LoopPolicy,
    ) -> None:
        """Prepare, jointly, the objects that are not prepared yet; objects of other kinds are ignored.

        On failure every object is restored. Objects that another accelerator had prepared are then released from it.
        """
        kinds = ObjectsByKind.sort(item for item in objects if item not in self)
        for item in (*kinds.models, *kinds.optimizers, *kinds.schedulers, *kinds.loaders):
            _release_from_owner(item)
        models = self._select_roots(kinds.models)
        self._check_supported(models, kinds.optimizers)
        bundle = Bundle(tuple(models), tuple(kinds.optimizers), tuple(kinds.schedulers))
        try:
            for model in models:
                self._move(model, (*kinds.optimizers, *self._stepper.bundle.optimizers))
                self._compile(model)
            for optimizer in kinds.optimizers:
                self._move_state(optimizer)
                self._wrap_optimizer(optimizer)
            for scheduler in kinds.schedulers:
                self._wrap_scheduler(scheduler, batch)
            for loader in kinds.loaders:
                self._shard(loader, batch, loops)
            if kinds.optimizers and self._comm.world.size > 1:
                align_parameters(kinds.optimizers, (*models, *self._stepper.bundle.models), self._comm)
            # The last step that may fail: with some strategies all ranks must unwrap, and possibly only one rank fails.
            self._stepper.strategy.wrap(bundle)
        except BaseException:
            self._restore((*kinds.loaders, *kinds.schedulers, *kinds.optimizers, *models))
            raise
        new = (*models, *kinds.optimizers, *kinds.schedulers, *kinds.loaders)
        try:
            for item in new:
                self._record(item)
            self._stepper.add(bundle)
            for model in models:
                self._checkpointer.apply(model)
                self._replace_calls(model, loops)
            self._record_ownership(models)
        except BaseException:
            for item in new:
                self._record(item)  # also objects whose preparation an interrupt has ended, so that they are released
            self.release(new)
            raise
        for scheduler in kinds.schedulers:
            is_early = bool(kinds.loaders) and batch == "per-worker" and self.schedule == "steps"
            self.has_early_schedule |= (
                is_early
                and self._stepper.strategy.data_coords()[1] > 1
                and not isinstance(scheduler, ReduceLROnPlateau)
            )
        for loader in kinds.loaders:
            self._observer.on_loader_prepared(loader)

    def _record(self, item: Any) -> None:
        is_loader, kept = isinstance(item, DataLoader), self._kept()
        self._objects[id(item)] = weakref.ref(item) if is_loader else lambda: item
        if is_loader and kept is not None:
            kept[id(item)] = item

    def _remove(self, item: Any) -> None:
        self._objects.pop(id(item), None)
        kept = self._kept()
        if kept is not None:
            kept.pop(id(item), None)

    def record_division(self, loader: DataLoader[Any], reading: WorkDivision | None) -> bool:
        """Record how a loader's batches are divided; return whether its description in the receipt changes."""
        if loader not in self:
            return False
        before = self.batch_descriptions.get(id(loader))
        self._set_division(loader, reading)
        return before != self.batch_descriptions[id(loader)]

    def _set_division(self, loader: DataLoader[Any], reading: WorkDivision | None) -> None:
        if reading is None:
            self.whole_loaders.pop(id(loader), None)
        else:
            self.whole_loaders[id(loader)] = reading
        self.batch_descriptions[id(loader)] = self._describe_batch(loader)

    def refresh(self) -> None:
        """Prepare again models of which a layer or method was replaced, or parameters frozen; every rank must call."""
        changed = self._stepper.changed_models()
        if not changed:
            return
        self._stepper.complete_held_gradients()
        policies = {id(model): self._call_policies.get(id(model)) for model in changed}
        for model in changed:
            self._free_model(model)
            self._move(model, self._stepper.bundle.optimizers)
            self._compile(model)
        self._stepper.strategy.wrap(Bundle(tuple(changed)))
        for model in changed:
            self._checkpointer.apply(model)
            policy = policies[id(model)]
            if policy is not None:
                self._replace_calls(model, policy)
        self._record_ownership(changed)
        self._stepper.refresh_trainable(changed)

    def begin_epoch(self, *, reads_shares: bool = True) -> bool:
        """Prepare for the first batch of a loop that trains, and return True; every rank must call.

        Ranks that read shares get separate random streams.
        """
        self.refresh()
        if not self._stepper.makes_local_steps:
            self._stepper.average_replicas()
        self._observer.on_epoch_start()
        if reads_shares:
            self.seed_ranks_separately()
        if self._rng_types:
            synchronize_rng_states(self._rng_types)
        return True

    def seed_ranks_separately(self) -> None:
        """Seed the generators of ranks that do not read the first share, once, so that dropout differs between ranks.

        While no loader is divided, every rank trains on the same batches and must draw the same numbers. Rank 0
        determines the order of a divided loader in any case.
        """
        if self._stepper.has_rank_rng:
            return
        self._stepper.has_rank_rng = True
        data_rank, _ = self._stepper.strategy.data_coords()
        if data_rank > 0:
            rng.set_seed(rng.derive_seed(int(torch.randint(2**62, (), device="cpu")), "rank", data_rank))

    @contextmanager
    def override_placement(self, chosen: Mapping[int, bool]) -> Iterator[None]:
        """Set by id whether objects that are prepared in the block are moved to the device, instead of the default."""
        self._placement_overrides = chosen
        try:
            yield
        finally:
            self._placement_overrides = {}

    def prepare_for_evaluation(self, model: nn.Module, precision: Precision) -> None:
        """Move a model to the device and make it compute in ``precision``; other ranks need not call."""
        if model in self:
            return
        _release_from_owner(model)
        self._move(model, ())
        self._compile(model)
        if precision.policy.compute is not None:
            replace_forward(model, forward_in_precision(model, precision))
            self._record_ownership([model])
        self._evaluated[id(model)] = model
        self._record(model)

    def drop_evaluated(self) -> None:
        """Drop the references to models that are not trained; they still compute in the run's precision."""
        for key in self._evaluated:
            self._objects.pop(key, None)

    def _is_placed(self, item: Any) -> bool:
        return self._placement_overrides.get(id(item), self._moves_objects)

    def _compile(self, model: nn.Module) -> None:
        if self._float8 is not None:
            self._float8.apply(model, self._compiler.compile_function)
        self._compiler.compile(model)

    def _check_supported(self, models: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> None:
        """Raise `MisuseError` for objects that the strategy does not support, before any is changed.

        Models that are not moved may be on any device; the strategy checks them when it wraps them.
        """
        refused = self._stepper.strategy.refusal(Bundle(tuple(filter(self._is_placed, models)), tuple(optimizers)))
        if refused is not None:
            raise MisuseError(str(refused))

    def _record_ownership(self, models: Iterable[nn.Module]) -> None:
        for model in models:
            if plain_class(model) is not type(model):
                setattr(type(model), _OWNERSHIP, Ownership(self._owner, self._free_model))

    def _replace_calls(self, model: nn.Module, loops: LoopPolicy) -> None:
        """Replace the forward that the strategy has set, if the policy requires it."""
        wrapped = loops.wrap_forward(model, current_forward(model))
        if wrapped is not None:
            replace_forward(model, wrapped)
            self._call_policies[id(model)] = loops

    def _free_model(self, model: nn.Module) -> None:
        if self._call_policies.pop(id(model), None) is not None:
            restore_forward(model)
        self._checkpointer.undo(model)
        if self._evaluated.pop(id(model), None) is not None:
            if plain_class(model) is not type(model) and not self._compiler.has_compiled_whole(model):
                restore_forward(model)
        else:
            self._stepper.strategy.unwrap(model)
        self._compiler.undo(model)
        if self._float8 is not None:
            self._float8.undo(model)

    def release(self, objects: Iterable[Any]) -> None:
        """Restore prepared objects to their state before preparation; ignore others."""
        released = [item for item in objects if item in self or id(item) in self._evaluated]
        for item in released:
            self._remove(item)
            self.whole_loaders.pop(id(item), None)
        self._restore(released)
        self._stepper.remove(released)

    def _restore(self, objects: Iterable[Any]) -> None:
        """Undo the preparation of objects, even if it is incomplete."""
        for item in objects:
            if isinstance(item, nn.Module):
                self._free_model(item)
            elif isinstance(item, Optimizer):
                proxy = self._stepper.optimizer_proxies.pop(id(item), None)
                if proxy is not None:
                    proxy.restore()
            elif isinstance(item, LRScheduler):
                unwrap_scheduler(item)
            elif isinstance(item, DataLoader):
                self.batch_descriptions.pop(id(item), None)
                self.whole_loaders.pop(id(item), None)
                unshard_loader(item)

    def _select_roots(self, models: list[nn.Module]) -> list[nn.Module]:
        """Return the models that are not submodules of others; release prepared models that they contain."""
        inside = {
            id(part): part
            for model in [*models, *self._stepper.bundle.models]
            for part in model.modules()
            if part is not model
        }
        roots = [model for model in models if id(model) not in inside]
        covered = {id(part) for model in roots for part in model.modules() if part is not model}
        self.release([model for model in self._stepper.bundle.models if id(model) in covered])
        return roots

    def _move(self, model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
        # A model that the strategy shards may be too large for a device: the strategy moves it shard by shard.
        if not self._is_placed(model) or self._stepper.strategy.capabilities.shards_params:
            return
        if any(tensor.device != self._device for tensor in (*model.parameters(), *model.buffers())):
            move_tied(model, lambda model: nn.Module.to(model, self._device), optimizers)

    def _move_state(self, optimizer: Optimizer) -> None:
        """Move an optimizer's state to the device of its parameters, in the groups and dtypes that it has."""
        if not self._is_placed(optimizer):
            return
        for group in optimizer.param_groups:
            counts_on_device = group.get("capturable") or group.get("fused")
            for parameter in group["params"]:
                held: Any = optimizer.state.get(parameter)
                state: dict[Any, Any] = held if isinstance(held, dict) else {}
                for name, value in list(state.items()):
                    if (name != "step" or counts_on_device) and _is_elsewhere(value, parameter.device):
                        state[name] = map_tensors(methodcaller("to", parameter.device), value)

    def _wrap_optimizer(self, optimizer: Optimizer) -> None:
        proxy = self._stepper.optimizer_proxies[id(optimizer)] = OptimizerProxy(optimizer, self._stepper)
        proxy.defer_zero_grad(self._stepper.defers_zero_grad)
        step: Any = optimizer.step
        setattr(step.__func__, _OWNERSHIP, Ownership(self._owner, lambda _, proxy=proxy: proxy.restore()))

    def _wrap_scheduler(self, scheduler: LRScheduler, batch: BatchSizeMeaning) -> None:
        proxy = self._stepper.optimizer_proxies.get(id(scheduler.optimizer))
        if proxy is None:
            raise MisuseError(
                f"the optimizer of this {type(scheduler).__name__} is not prepared: prepare both, as in "
                "prepare(model, optimizer, scheduler)"
            )
        measures = isinstance(scheduler, ReduceLROnPlateau)
        if measures and self._comm.world.size > 1:
            average_metric(scheduler, self._comm, self._stepper.check_all_call)
        if self.schedule != "calls":
            # With per-worker batches an epoch has fewer steps than in one process, by the number of ranks: option
            # ``samples`` advances schedules by that many. ReduceLROnPlateau counts metrics, not steps.
            is_ahead = self.schedule == "samples" and batch == "per-worker" and not measures
            num_calls = self._stepper.strategy.data_coords()[1] if is_ahead else 1
            wrap_scheduler(scheduler, proxy, num_calls, self._observer.schedule_observer)
        if plain_class(scheduler) is not type(scheduler):
            setattr(type(scheduler), _OWNERSHIP, Ownership(self._owner, unwrap_scheduler))

    def _shard(self, loader: DataLoader[Any], batch: BatchSizeMeaning, loops: LoopPolicy) -> None:
        self._has_per_worker_batches = batch == "per-worker"
        strategy = self._stepper.strategy
        is_placed = self._is_placed(loader)
        shard_loader(
            loader,
            comm=self._comm,
            batch=batch,
            device=self._device if is_placed else "cpu",
            observer=_LoopEvents(loops, self._stepper, self.undivided_batch, self._observer),
            coords=strategy.data_coords(),
            options=self.data,
            seed=self._seed,
            place_batch=strategy.place if strategy.capabilities.places_batches and is_placed else None,
        )
        if isinstance(loops, TrainingLoops):  # others may read the loader by its own iterator
            replace_state_methods(loader, self._comm)
        setattr(type(loader), _OWNERSHIP, Ownership(self._owner, unshard_loader))
        self._set_division(loader, loops.describe_division(loader))

    def _describe_batch(self, loader: DataLoader[Any]) -> str:
        """Return the batch size of a prepared loader and the share that each rank reads, as text."""
        size, workers = loader.batch_size, self._stepper.strategy.data_coords()[1]
        reading = self.whole_loaders.get(id(loader))
        if workers == 1 or (reading is not None and not reading.computes_rows):
            batch = "no batch size" if size is None else f"batch {size}"
            return batch if workers == 1 or reading is None else f"{batch}, {reading.text}"
        rows = "" if reading is None else f" rows{reading.text}"
        if size is None:
            return "no batch size"
        total = size * workers if self._has_per_worker_batches and reading is None else size
        share = f"{total // workers}" if total % workers == 0 else f"{total // workers} or {total // workers + 1}"
        return f"batch {total} = {workers} x {share}{rows}"


def _is_elsewhere(value: Any, device: torch.device) -> bool:
    return any(tensor.device != device for tensor in find_tensors(value))


def known_length(loader: DataLoader[Any]) -> int | None:
    """Return the number of batches that this rank reads in an epoch; None for a stream whose length is not known."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def describe_object(item: Any, name: str | None, batches: dict[int, str]) -> str:
    """Return a short description of a prepared object, for the receipt."""
    label = f"{name} " if name else ""
    kind = type(item).__name__
    if isinstance(item, nn.Module):
        count = sum(math.prod(full_shape(parameter)) for parameter in item.parameters())
        return f"{label}{kind} ({count:,} parameters)"
    if isinstance(item, DataLoader):
        return f"{label}{kind} ({batches.get(id(item), 'no batch size')})"
    return f"{label}{kind}"


def is_prepared(item: Any) -> bool:
    """Return whether an accelerator that is not closed has prepared a model, optimizer, scheduler or loader."""
    ownership = _find_ownership(item)
    owner = None if ownership is None else ownership.owner()
    return owner is not None and not owner.is_closed and any(item is known for known in owner.prepared_objects)


def collect_notes(
    objects: Sequence[Any],
    num_workers: int,
    device: torch.device,
    whole: Collection[int],
    *,
    divides_models: bool = False,
) -> list[str]:
    """Return lines about differences from a run on one device; ``whole`` are the ids of loaders that are read whole.

    With ``divides_models`` the code is a plain cell, which differs only if a loader is divided.
    """
    if num_workers == 1 or (
        divides_models and not any(isinstance(item, DataLoader) and id(item) not in whole for item in objects)
    ):
        return []
    notes: list[str] = []
    modules = [part for item in objects if isinstance(item, nn.Module) for part in item.modules()]
    if any(isinstance(part, _BatchNorm) and not isinstance(part, nn.SyncBatchNorm) for part in modules):
        remedy = "; nn.SyncBatchNorm.convert_sync_batchnorm shares them" if not device_type(device).is_host else ""
        notes.append(f"batch normalization uses each worker's own statistics{remedy}")
    if any(isinstance(part, _DropoutNd) and part.p > 0 for part in modules):
        notes.append("dropout differs from a run on one device: each worker draws its own")
    if any(isinstance(item, DataLoader) and id(item) not in whole for item in objects):
        notes.append("a printed loss or count is rank 0's share")
    trains = any(isinstance(item, Optimizer) for item in objects)
    if trains and not any(isinstance(item, DataLoader) for item in objects):
        notes.append("no DataLoader is prepared: every worker trains on the same batches")
    return notes


def _release_from_owner(item: Any) -> None:
    """Release the object from the accelerator that prepared it, so that another one can prepare it.

    A cell that builds an accelerator and prepares objects is often run repeatedly.
    """
    ownership = _find_ownership(item)
    if ownership is None:
        return
    owner = ownership.owner()
    if owner is not None and not owner.is_closed:
        owner.components.preparer.release([item])
    else:
        ownership.release(item)


def _find_ownership(item: Any) -> Ownership | None:
    if isinstance(item, Optimizer):
        return getattr(getattr(item.step, "__func__", None), _OWNERSHIP, None)
    return vars(type(item)).get(_OWNERSHIP)
