"""The facade: the names that people who train with PyTorch know, over the parts that do the work."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from enum import Enum
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from accel_nb.accelerator.options.fsdp_plugin import FullyShardedDataParallelPlugin
from accel_nb.accelerator.options.plugins import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DeepSpeedPlugin,
    GradientAccumulationPlugin,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
    checked_handlers,
    layers_of,
    one_of_two,
    refuse_later,
)
from accel_nb.accelerator.prepare.activation_checkpointing import Recomputer
from accel_nb.accelerator.prepare.compiling import Compiler
from accel_nb.accelerator.prepare.preparer import Kinds, Preparer, describe_object, notes_on
from accel_nb.accelerator.prepare.strategy_choice import Planner
from accel_nb.accelerator.process.init_world import enter
from accel_nb.accelerator.process.memory_release import release_memory
from accel_nb.accelerator.process.seeding import checked_types
from accel_nb.accelerator.process_state import AcceleratorState, GradientState
from accel_nb.accelerator.state.resuming import Resumer
from accel_nb.accelerator.state.save_report import Saved, describe_nothing_saved, describe_saves
from accel_nb.accelerator.state.training_state import HookHandle, LoadHook, LoadReport, SaveHook, TrainingState
from accel_nb.accelerator.tracking.metrics import RowHistory, cut_to_samples, gather_for_metrics
from accel_nb.accelerator.tracking.run_tracking import Tracked, weakly
from accel_nb.accelerator.training.autosave import Autosave
from accel_nb.accelerator.training.join import joined
from accel_nb.accelerator.training.lr_preview import RatePlanner
from accel_nb.accelerator.training.profiling import Profiler, profiled
from accel_nb.accelerator.training.run_control import Helm, current_steering
from accel_nb.accelerator.training.stepper import Stepper
from accel_nb.accelerator.training.trigger import Trigger
from accel_nb.checkpoint.export import WeightFiles, distinct, save_plain
from accel_nb.checkpoint.full_tensors import whole_weights
from accel_nb.config import Resolved, ambient_config, ambient_layers, environment_layer, resolve
from accel_nb.config.sections import AutocastOptions
from accel_nb.config.value_types import seconds_of
from accel_nb.data.loader import BatchMeaning, Skipping, skip_first_batches
from accel_nb.data.order import Share
from accel_nb.errors import CheckpointError, ConfigError, MisuseError
from accel_nb.precision import build_precision
from accel_nb.precision.fp8 import Float8Layers
from accel_nb.runtime.devices.device import choose_precision, has_real_bf16
from accel_nb.runtime.distributed import sharded
from accel_nb.runtime.distributed.collectives import Collectives, VerifiedComm
from accel_nb.runtime.distributed.communicator import Communicator, Operation
from accel_nb.runtime.process import rng
from accel_nb.runtime.process.built_accelerators import note_built
from accel_nb.runtime.process.environment import option_variables
from accel_nb.runtime.process.secrets import redact
from accel_nb.runtime.tensors.tied import find_tied
from accel_nb.runtime.world import World
from accel_nb.strategies import Registry, Strategy, choose
from accel_nb.strategies.base import Bundle
from accel_nb.strategies.choice import AUTO, with_options
from accel_nb.strategies.instance_patching import plain_view
from accel_nb.telemetry.events import CheckpointSaved, NullSink, Prepared, Sink, current_sink
from accel_nb.telemetry.memory import MemoryMeter
from accel_nb.telemetry.step_meter import StepMeter
from accel_nb.telemetry.trackers.selection import checked_choice

T = TypeVar("T")


class Accelerator(Tracked):
    """Prepares models, optimizers, schedulers and loaders to train on every device of its world.

    Every rank builds it and makes the same calls. Nothing is shared between accelerators: several may live side by
    side, as long as each has its own objects.
    """

    def __init__(
        self,
        *,
        mixed_precision: Literal["no", "bf16", "fp16", "fp8", "auto"] | Enum | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool = False,
        strategy: str | None = None,
        seed: int | None = None,
        clip: float | None = None,
        batch: BatchMeaning | None = None,
        config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        device_placement: bool = True,
        split_batches: bool | None = None,
        step_scheduler_with_optimizer: bool | None = None,
        rng_types: Sequence[str | Enum] | None = None,
        dataloader_config: DataLoaderConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        dynamo_backend: str | Enum | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        kwargs_handlers: Sequence[Any] | None = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        comm: Communicator | None = None,
        world: World | None = None,
        sink: Sink | None = None,
        registry: Registry | None = None,
        log_with: Any = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        deepspeed_plugin: DeepSpeedPlugin | None = None,
        deepspeed_plugins: object = None,
        megatron_lm_plugin: object = None,
        torch_tp_plugin: object = None,
        parallelism_config: object = None,
    ) -> None:
        """Resolve the options and enter the world; what is not given comes from the cell's flags, or is a default.

        Args:
            mixed_precision: ``no``, ``bf16``, ``fp16``, ``fp8``, or ``auto`` for the best that the device really has.
            gradient_accumulation_steps: Micro-batches for one optimizer step.
            cpu: Train on the CPU although there is an accelerator.
            strategy: A strategy's name, or ``auto``.
            seed: Seed of Python, NumPy and torch; once a loader is divided each rank derives a stream of its own.
            clip: Total norm to clip gradients to before each step.
            batch: Whether a loader's batch is each worker's (``per-worker``) or that of all (``global``).
            config: Further options by name, such as ``{"ddp": {"find_unused_parameters": True}}``, or the path of a
                YAML file with options.
            device_placement: Move models, optimizer state and batches to this rank's device.
            split_batches: The same as ``batch``: True is ``global``, False is ``per-worker``.
            step_scheduler_with_optimizer: False lets schedulers advance with each call, whatever the optimizer does.
            rng_types: Give every rank rank 0's states of these generators when a loader's epoch begins: ``python``,
                ``numpy``, ``torch``, ``cuda``. A loader's own ``generator`` always is rank 0's.
            dataloader_config: How loaders are read; the ``data`` section of the options under well-known names.
            gradient_accumulation_plugin: How gradients are accumulated, under well-known names.
            dynamo_backend: Backend of torch.compile for prepared models.
            dynamo_plugin: Options of torch.compile, under well-known names.
            kwargs_handlers: At most one each of `AORecipeKwargs`, `AutocastKwargs`,
                `DistributedDataParallelKwargs`, `GradScalerKwargs`, `InitProcessGroupKwargs` and `ProfileKwargs`.
            project_dir: Folder of the run, as ``project_dir`` tells it.
            project_config: Folders of the run, under well-known names.
            comm: The communicator of an open world; found from the environment if not given.
            world: This process's place, if neither the environment nor ``comm`` says it.
            sink: Takes the events of training; by default the cell's.
            registry: The strategies to choose from; by default those installed.
            log_with: Where `log` writes beside the panel, once `init_trackers` was called: ``jsonl``, ``tensorboard``,
                ``wandb``, ``mlflow``, ``comet_ml``, ``clearml``, ``aim``, ``swanlab``, ``trackio``, ``dvclive``,
                ``all`` that are installed, a tracker of your own, or a list of these.
            deepspeed_plugin: Train by DeepSpeed's ZeRO, with options under well-known names or its own configuration.
            fsdp_plugin: Train by FSDP2, with options under well-known names.
            deepspeed_plugins: Refused, as all that follow; there is one configuration.
            megatron_lm_plugin: Not served.
            torch_tp_plugin: Not served yet.
            parallelism_config: Not served yet.

        Raises `ConfigError`, with every problem at once, for values that cannot be and arguments that disagree.
        """
        refuse_later(
            {
                "deepspeed_plugins": deepspeed_plugins,
                "megatron_lm_plugin": megatron_lm_plugin,
                "torch_tp_plugin": torch_tp_plugin,
                "parallelism_config": parallelism_config,
            }
        )
        self._tracker_choice = checked_choice(log_with)
        handlers = checked_handlers(kwargs_handlers)
        arguments = {
            "precision": mixed_precision,
            "accumulate": gradient_accumulation_steps,
            "strategy": strategy,
            "seed": seed,
            "clip": clip,
            "batch": one_of_two("batch", batch, "split_batches", _BATCH[split_batches]),
            "schedule": "calls" if step_scheduler_with_optimizer is False else None,
            "compile.backend": None
            if dynamo_backend is None
            else str(getattr(dynamo_backend, "value", dynamo_backend)).lower(),
        }
        project = project_config or ProjectConfiguration()
        folder = one_of_two("project_dir", project_dir, "ProjectConfiguration.project_dir", project.project_dir)
        self._project = replace(project, project_dir=folder)
        records = (
            dataloader_config, gradient_accumulation_plugin, dynamo_plugin, deepspeed_plugin, fsdp_plugin,
            self._project, *handlers,
        )  # fmt: skip
        self._resolved = _resolve(config, arguments, records)
        if step_scheduler_with_optimizer and self._resolved.config.schedule == "calls":
            raise ConfigError(
                "step_scheduler_with_optimizer=True from Accelerator(...) and schedule=calls from "
                f"{self._resolved.origins['schedule']} disagree; remove one of the two"
            )
        self._profile_handler = next((item for item in handlers if isinstance(item, ProfileKwargs)), ProfileKwargs())
        options = self._resolved.config
        self._comm, self._group = enter(comm, world, cpu, options.group)
        self._collectives = Collectives(self._comm, verify=options.debug)
        if options.debug and self._comm.world.size > 1:
            self._comm = VerifiedComm(self._comm)
        self._world = self._comm.world
        self._registry = registry or Registry()
        divider = fsdp_plugin or deepspeed_plugin
        is_alone = divider is not None and self._world.size == 1
        if is_alone:
            warnings.warn(
                f"{type(divider).__name__}(...) divides a model among workers, and there is one: it trains as without",
                stacklevel=2,
            )
        self._divider = divider
        chosen = choose(AUTO if is_alone else options.strategy, self._world, self._registry)
        self._device = chosen.capabilities.open_device(self._world)
        self._sink = current_sink.get() if sink is None else sink
        precision = build_precision(options.precision, self._device, autocast=options.autocast, scaler=options.scaler)
        self._strategy: Strategy = chosen(getattr(options, chosen.name, None), precision)
        self._strategy.open(self._world, self._comm)
        self._planner: Planner | None = None
        if options.strategy == AUTO:
            self._planner = Planner(self._resolved, self._comm, self._device, precision.policy.name, self._registry)
        # What the last plan chose, and why.
        self._chosen: Mapping[str, Any] = {"strategy": chosen.name}
        self._plan_line: str | None = None
        self._stepper = Stepper(
            self._strategy,
            self._world,
            self._comm,
            accumulate=options.accumulate,
            clip=options.clip,
            meter=StepMeter(
                self._world.rank,
                self._device,
                self._sink,
                refuses_nan=options.sentinels and not precision.policy.loss_scaling,
            ),
            memory=MemoryMeter(self._world.rank, self._device, self._sink),
            window=options.accumulation,
            has_sentinels=options.sentinels,
        )
        self._compiler = Compiler(options.compile)
        self._float8 = Float8Layers(self._device, options.fp8) if precision.policy.name == "fp8" else None
        self._recomputer = Recomputer(options.activation_checkpointing)
        self._rate_planner: RatePlanner | None = None
        if self._world.is_main and not isinstance(self._sink, NullSink):
            self._rate_planner = RatePlanner(self._sink, self._world.rank, self._stepper)
        self._preparer = Preparer(
            self,
            self._stepper,
            self._comm,
            self._device,
            compiler=self._compiler,
            recomputer=self._recomputer,
            float8=self._float8,
            schedule=options.schedule,
            data=options.data,
            seed=options.seed,
            is_placing=device_placement,
            rng_types=checked_types(rng_types),
            hearing=self._rate_planner,
        )
        if self._rate_planner is not None:
            self._rate_planner.epoch_lengths = self._preparer.epoch_lengths
        self._state = TrainingState(
            self._comm, self._device, self._stepper, self._resolved, lambda preparer=self._preparer: preparer.objects
        )
        self._preparer.on_loader = self._state.adopt
        self._state.tracked_run = weakly(self._tracked_run)
        self._state.take_up_run = weakly(self._take_up_run)
        self._trigger = Trigger(self._comm)
        self._metric_owners: list[int] | None = None
        self._row_history = RowHistory()
        self._is_closed = False
        self._saved: list[Saved] = []
        self._first_step = 0
        self._state.on_saved = _noting(self._saved, self._sink, self._world.rank)
        self._autosave: Autosave | None = None
        steering = current_steering.get()
        self._helm = None if steering is None else Helm(steering, self._stepper, self._stepper.meter)
        self._hear_boundaries()
        if isinstance(options.checkpoint.every, str):
            self.checkpoint_every(seconds=seconds_of(options.checkpoint.every))
        else:
            self.checkpoint_every(steps=options.checkpoint.every)
        self._resumer = Resumer(self._state, self._preparer)
        self._resumer.begin_run(options.checkpoint.resume)
        if options.seed is not None:
            rng.set_seed(options.seed)
        if options.checkpoint.dir is not None or options.checkpoint.resume is not None:
            note_built(self)

    # --- what it runs with ---

    @property
    def resolved(self) -> Resolved:
        """The options and where each came from."""
        return self._resolved

    @property
    def mixed_precision(self) -> str:
        """The precision that is really used: never ``auto``."""
        return self._strategy.precision.policy.name

    @property
    def gradient_accumulation_steps(self) -> int:
        """How many micro-batches make one optimizer step; may be set between windows."""
        return self._stepper.window.size

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        if not isinstance(steps, int) or steps < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise MisuseError(f"gradient_accumulation_steps is {steps!r}; it is a whole number of at least 1")
        self._stepper.set_accumulation(steps)

    @property
    def sync_gradients(self) -> bool:
        """Whether the current (or latest) micro-batch closes its accumulation window, so that optimizers step."""
        return self._stepper.window.synchronises

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the latest optimizer step was left out because float16 gradients overflowed."""
        return self._stepper.was_skipped

    @property
    def state(self) -> AcceleratorState:
        """Where this rank stands and in which precision it trains, as a record to read."""
        return AcceleratorState.of(self, self.mixed_precision, debug=self._resolved.config.debug, divider=self._divider)

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """The record that was given to train by DeepSpeed, if one was."""
        return self.state.deepspeed_plugin

    @property
    def gradient_state(self) -> GradientState:
        """Where the present micro-batch stands in its accumulation window, as a live view."""
        return GradientState(self._stepper.window, self._resolved.config.accumulation)

    @property
    def multi_device(self) -> bool:
        """Whether there is more than one rank, each with its own device."""
        return self.use_distributed

    @property
    def step(self) -> int:
        """How many micro-batches of the open accumulation window have ended."""
        return self._stepper.window.num_held

    @property
    def scaler(self) -> torch.amp.grad_scaler.GradScaler | None:
        """PyTorch's scaler of fp16 losses; None in other precisions."""
        return self._strategy.precision.scaler

    @property
    def native_amp(self) -> bool:
        """Whether models compute under torch.autocast."""
        return self._strategy.precision.policy.compute is not None

    @property
    def split_batches(self) -> bool:
        """Whether a prepared loader's batch is that of all workers together."""
        return self._resolved.config.batch == "global"

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether rank 0 alone reads loaders; None if that depends on the loader."""
        return self._preparer.data.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether all ranks take equally many samples; may be set for the loaders that are prepared from then on."""
        return self._preparer.data.even_batches

    @even_batches.setter
    def even_batches(self, is_on: bool) -> None:
        if not isinstance(is_on, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise MisuseError(f"even_batches is {is_on!r}; it is True or False")
        self._preparer.data = self._preparer.data.model_copy(update={"even_batches": is_on})

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether loaders shuffle in an order that depends on seed and epoch only."""
        return self._preparer.data.use_seedable_sampler

    @property
    def non_blocking(self) -> bool | None:
        """Whether the next batch is copied ahead of time; None if that depends on the loader."""
        return self._preparer.data.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether loaders are replaced by torchdata's, which they never are."""
        return False

    @property
    def project_dir(self) -> str | os.PathLike[str] | None:
        """Folder of the run, if one was given."""
        return self._project.project_dir

    @property
    def holds_optimizers(self) -> bool:
        """Whether anything that trains has been prepared."""
        return bool(self._stepper.bundle.optimizers)

    @property
    def is_torn(self) -> bool:
        """Whether an error ended a backward pass in its middle: models are then to be prepared anew."""
        return self._stepper.is_torn

    @property
    def prepared_objects(self) -> tuple[Any, ...]:
        """Everything that is prepared, in the order in which it came."""
        return tuple(self._preparer.objects)

    def divided_tensors(self) -> list[Tensor]:
        """Return the prepared parameters, and tensors of optimizers, of which this rank holds a part.

        They are the same in the same order on every rank.
        """
        bundle = self._stepper.bundle
        found = [value for model in bundle.models for value in model.parameters()]
        for optimizer in bundle.optimizers:
            entries = [optimizer.state.get(value, {}) for group in optimizer.param_groups for value in group["params"]]
            found += [value for values in entries for value in values.values()]
        return [value for value in found if sharded.is_sharded(value)]

    def memory_map(self) -> dict[str, int]:
        """Return bytes of parameters (with buffers), gradients and optimizer state on this rank, as last measured.

        They are measured at the first optimizer step, and at most five times a second after that.
        """
        return self._stepper.held_bytes

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    # --- training ---

    def prepare(self, *objects: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Make models, optimizers, schedulers and loaders work on this world, in place; return the same objects.

        All of them are prepared jointly, so give everything that is trained together in one call. Anything else is
        returned as it is. Every rank must call; rank 0's weights become everyone's.

        An object that another accelerator holds is taken over from it: the newest one has it.

        ``device_placement`` says for each object whether it, or its batches, are moved to this rank's device; None
        means as the accelerator was told. Raises `MisuseError` for another number of them than objects.
        """
        if device_placement is not None and len(device_placement) != len(objects):
            raise MisuseError(
                f"prepare was given {len(objects)} objects and {len(device_placement)} values of device_placement; "
                "give one for each object, or leave it out"
            )
        placing = {
            id(item): bool(is_placed)
            for item, is_placed in zip(objects, device_placement or (), strict=False)
            if is_placed is not None
        }
        batch = self._resolved.config.batch or "per-worker"
        with self._preparer.placing(placing):
            is_new = self._prepare(
                objects, batch=batch, is_training=_always, begins_training=lambda _: self._preparer.begin_epoch()
            )
        if is_new:
            self.report()
        return objects[0] if len(objects) == 1 else objects

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare one model; see `prepare`.

        With ``evaluation_mode`` it is moved and computes in the run's precision, and that is all: for a model that is
        not trained, such as a teacher. Ranks then need not all call.
        """
        if evaluation_mode:
            with self._preparer.placing({} if device_placement is None else {id(model): device_placement}):
                self._preparer.prepare_for_evaluation(model, self._strategy.precision)
            return model
        return self.prepare(model, device_placement=[device_placement])

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> torch.optim.Optimizer:
        """Prepare one optimizer; see `prepare`."""
        return self.prepare(optimizer, device_placement=[device_placement])

    def prepare_scheduler(self, scheduler: torch.optim.lr_scheduler.LRScheduler) -> Any:
        """Prepare one scheduler, whose optimizer is prepared; see `prepare`."""
        return self.prepare(scheduler)

    def prepare_data_loader(
        self, data_loader: DataLoader[T], device_placement: bool | None = None, slice_fn_for_dispatch: None = None
    ) -> DataLoader[T]:
        """Prepare one loader; see `prepare`.

        ``slice_fn_for_dispatch`` may only be None: a dispatched batch is divided along the first dim of each tensor.
        """
        if slice_fn_for_dispatch is not None:
            raise MisuseError(
                "slice_fn_for_dispatch is not served: a dispatched batch is divided along the first dim of each "
                "tensor; leave it out, and divide by split_between_processes what is divided in another way"
            )
        return self.prepare(data_loader, device_placement=[device_placement])

    def backward(
        self,
        loss: Tensor,
        *,
        weight: float | Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
    ) -> None:
        """Compute gradients of the loss: scaled, weighted and averaged over ranks as the run needs.

        A loss is the mean over this rank's samples. With ``weight`` it is a sum, and ``weight`` says of how much, such
        as the number of tokens that are not padding: the window's gradient is then the sum over all micro-batches and
        ranks divided by the sum of all weights, as in one big batch. That takes one number from each rank for each
        window; a weight that is a tensor on the device is not waited for.

        Raises `MisuseError` for a loss that is no tensor or has no gradient, and for weights in a part of a window.
        """
        if weight is not None:
            self._stepper.backward(loss, weight, retain_graph=bool(retain_graph), create_graph=create_graph)
        elif retain_graph is None and not create_graph:
            self._stepper.backward(loss)
        else:
            self._stepper.backward(loss, retain_graph=bool(retain_graph), create_graph=create_graph)

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Return the context of one micro-batch: optimizers step, and gradients are averaged, in each window's last.

        A loader's last batch always closes the window. ``models`` is accepted for familiarity: all that are prepared
        take part.
        """
        return self._stepper.window

    def no_sync(self, model: nn.Module | None = None) -> AbstractContextManager[None]:
        """Return a context in which gradients stay on this rank."""
        return self._stepper.without_sync(self._stepper.bundle.models if model is None else [model])

    @contextmanager
    def trigger_sync_in_backward(self, model: nn.Module) -> Generator[None, None, None]:
        """Average the model's gradients in the backward passes of the block, though their forward was in `no_sync`.

        What they have added up on each rank until then is averaged as well, by the next step at the latest.
        """
        self._strategy.grad_sync(model, True)
        try:
            yield
        finally:
            self._strategy.grad_sync(model, self._stepper.window.averages)

    def join_uneven_inputs(
        self, joinables: Sequence[Any] | None = None, even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """Return a context in which ranks may run out of data at different times; every rank must enter it.

        A rank that leaves the block early waits there and takes part in the steps of the others. A step is the mean
        over the batches that it has seen, on the ranks that had one: as in one process that was given just these. At
        the end all ranks have the models, optimizers and schedulers of one that stepped to the last.

        Gradients are averaged at each step instead of during backward, so keep the block to the training loop.
        Gather and reduce after it: inside of it they raise `MisuseError`, as nobody answers for a rank that has ended.
        Batches of an accumulation window that no rank closes are dropped.

        ``joinables`` is accepted for familiarity: all that is prepared takes part. Prepared loaders never repeat
        samples to make ranks even, so ``even_batches`` may only be None or False.
        """
        if even_batches:
            raise MisuseError(
                "even_batches=True would repeat samples until ranks are even, which prepared loaders never do; "
                "leave it out"
            )
        if not self._strategy.capabilities.keeps_local:
            raise MisuseError(
                f"uneven inputs cannot be joined under the strategy {self._strategy.name!r}, whose ranks hold a part "
                "of the model each; prepare the loader, which gives every rank as many batches"
            )
        return joined(self._stepper, self._comm, self._collectives)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return a context that computes in the run's precision; prepared models do so by themselves.

        ``autocast_handler`` replaces options of the run in this context only.
        """
        if autocast_handler is None:
            return self._strategy.precision.autocast()
        changes = {name.removeprefix("autocast."): value for name, value in autocast_handler.as_options().items()}
        options = AutocastOptions.model_validate({**self._resolved.config.autocast.model_dump(), **changes})
        return build_precision(self.mixed_precision, self._device, autocast=options).autocast()

    def clip_grad_norm_(self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip gradients to a total norm and return the norm before; inside of an open window only measure it."""
        return self._stepper.clip_norm(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Clip each gradient to ``[-clip_value, clip_value]``; does nothing inside of an open window."""
        self._stepper.clip_value(parameters, clip_value)

    def unscale_gradients(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Undo the loss scaling in the gradients, of one optimizer or all, before they are read."""
        for known in self._stepper.bundle.optimizers if optimizer is None else [optimizer]:
            self._strategy.unscale(known)

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return the model in its plain class, over the same weights; the model itself stays prepared.

        What is set on one of the two is set on both. `free_memory` takes a model itself out of the accelerator.

        ``keep_fp32_wrapper=False`` leaves the run's precision away, ``keep_torch_compile=False`` compiled code; the
        latter raises `MisuseError` for a model whose blocks are compiled, as both have the same.
        """
        if not keep_torch_compile and self._compiler.has_compiled_blocks(model):
            raise MisuseError(
                f"the blocks of this {type(model).__name__} are compiled, and are those of the plain model too: "
                "free_memory(model) gives it back without, or set compile.regional to false"
            )
        precision = self._strategy.precision if keep_fp32_wrapper and model in self._preparer else None
        return plain_view(model, precision, keeps_inner=keep_torch_compile and self._compiler.has_compiled(model))

    def free_memory(self, *objects: Any) -> list[None]:
        """Give objects back as they came (none named: all), and free cached device memory.

        Returns a None for each object, to overwrite the caller's names with.
        """
        self._preparer.release(objects or self._preparer.objects)
        return release_memory(*objects)

    def clear(self, *objects: Any) -> list[None]:
        """Do what `free_memory` does."""
        return self.free_memory(*objects)

    def verify_device_map(self, model: nn.Module) -> bool:
        """Return whether a model was spread over several devices by a device map, and so cannot be prepared."""
        maps = (getattr(module, "hf_device_map", None) for module in model.modules())
        return any(
            isinstance(found, Mapping) and len(set(cast("Mapping[str, Any]", found).values())) > 1 for found in maps
        )

    # --- checkpoints ---

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        blocking: bool = True,
    ) -> str:
        """Save everything that the training needs to go on, and return where; every rank must call.

        Args:
            output_dir: The checkpoint's own folder or URL, in which it replaces any other checkpoint; none given:
                ``step_N`` in ``checkpoint.dir``, where those of another run stay.
            safe_serialization: Anything: tensors are kept in safetensors, whatever it says.
            blocking: Return when the checkpoint is complete; else once the tensors are copied, and write meanwhile.

        A checkpoint is complete or it does not exist. Raises `CheckpointError`, on every rank, for what cannot be
        stored or written, and for a background save before this one that failed.
        """
        return self._state.save(output_dir, blocking=blocking)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        *,
        strict: bool = True,
        layout: Literal["accel_nb", "accelerate"] = "accel_nb",
    ) -> LoadReport:
        """Load a checkpoint, or the newest whole one of a folder, into what is prepared; every rank must call.

        Any world size may load. Everything is verified first, and nothing is loaded unless all of it fits, or
        ``strict`` is off. A prepared loader's next iteration goes on where the checkpoint was saved: what is left of
        that epoch, each sample once.

        ``layout="accelerate"`` reads a folder that accelerate's ``save_state`` has written: weights, optimizers,
        schedulers, loss scale, registered objects and random numbers. Its pickled files are read as tensors and plain
        values only. It knows no position in the data, so loaders begin their epoch anew.

        Raises `NoCheckpoint`, `CorruptCheckpoint` and `CheckpointError`.
        """
        if layout == "accel_nb":
            return self._state.load(input_dir, strict=strict)
        if layout != "accelerate" or input_dir is None:
            raise MisuseError(
                f"load_state was given the layout {layout!r} and the folder {input_dir!r}: a layout is 'accel_nb' or "
                "'accelerate', and the latter needs a folder"
            )
        return self._state.load_foreign(input_dir, strict=strict)

    def checkpoint_every(self, steps: int | None = None, *, seconds: float | None = None) -> None:
        """Save in the background each time so many steps, or so many seconds, have passed; neither: when asked only.

        A save is made when a loop over a prepared loader asks for its next batch, and goes to ``step_N`` in
        ``checkpoint.dir``. Every rank must call. Raises `MisuseError` without that folder.
        """
        if steps is None and seconds is None and self._resolved.config.checkpoint.dir is None:
            return
        if self._resolved.config.checkpoint.dir is None:
            raise MisuseError(
                "checkpoint_every() needs a folder: set checkpoint.dir (flag --checkpoint, or "
                "config={'checkpoint': {'dir': ...}})"
            )
        for name, value in (("steps", steps), ("seconds", seconds)):
            if value is not None and (isinstance(value, bool) or not value > 0 or (name == "steps" and value % 1)):
                raise MisuseError(f"checkpoint_every({name}={value!r}): give a number above 0, whole for steps")
        stepper, state = self._stepper, self._state
        self._autosave = Autosave(
            self._comm,
            lambda: state.save(None, blocking=False),
            lambda: stepper.num_steps,
            steps=steps,
            seconds=seconds,
            is_behind=lambda: state.is_behind,
        )
        self._state.on_loaded = self._autosave.go_on_from
        self._hear_boundaries()

    def _hear_boundaries(self) -> None:
        """Have loops over prepared loaders tell when they are done with a batch, as far as anybody wants to know."""
        stepper, autosave, helm = self._stepper, self._autosave, self._helm
        if helm is not None:
            helm.autosave = autosave
        steer = None if helm is None else helm.boundary
        if autosave is None:
            self._preparer.set_boundary(steer)
            return

        def boundary() -> None:
            if not stepper.is_joined:  # ranks that have run out of data answer no messages
                autosave.boundary()
                if steer is not None:
                    steer()

        self._preparer.set_boundary(boundary)

    def ask_for_checkpoint(self) -> None:
        """Save soon, at the end of a step: any rank may ask, in a signal handler too. Needs ``checkpoint.dir``."""
        if self._autosave is not None:
            self._autosave.ask()

    def ask_to_stop(self) -> bool:
        """Save and raise KeyboardInterrupt at the end of a step, on every rank after the same one; any thread may ask.

        Returns False if this rank is in no loop that is about to end a step, or has no ``checkpoint.dir``.
        """
        return self._autosave is not None and self._autosave.ask_to_stop()

    def begin_run(self, resume: str | None = None) -> None:
        """Count epochs from here: a cell, or a script, begins; ``resume`` is what the option ``checkpoint.resume`` is.

        Steps of a plain cell count from 1, unless it writes or resumes checkpoints: their numbers continue.

        With it, the checkpoint is loaded when the first loop that trains begins, and loops over epochs that it holds as
        finished pass empty.
        """
        self._saved.clear()
        if self._stepper.is_plain and self._resolved.config.checkpoint.dir is None and resume is None:
            self._stepper.meter.step = 0
        self._first_step = self._stepper.num_steps
        if self._autosave is not None:
            self._autosave.begin_run()
        if self._helm is not None:
            self._helm.begin_run()
        if self._rate_planner is not None:
            self._rate_planner.begin_run()
        self._resumer.begin_run(resume)

    def end_run(self) -> list[str]:
        """Wait for the save in the background, and return what was resumed and saved, one line each."""
        self._stepper.flush()
        self._state.wait()
        lines = self._resumer.end_run()
        autosave, where = self._autosave, self._resolved.config.checkpoint.dir
        has_trained = self._stepper.num_steps > self._first_step
        if autosave and autosave.has_interval and not autosave.is_reached and has_trained:
            lines.append(
                "--every had no effect: no prepared DataLoader was iterated to train; save_state() saves at once"
            )
        return lines + describe_saves(self._saved, where, 0 if autosave is None else autosave.num_late)

    def fingerprint(self) -> str | None:
        """Return a digest of the weights that were trained since `begin_run`, equal on ranks that hold the same ones.

        None where nothing was trained, or each rank holds something of its own.
        """
        has_trained = self._stepper.num_steps > self._first_step
        return self._stepper.fingerprint() if has_trained else None

    def end_interrupted_run(self) -> list[str]:
        """Return what a run that was interrupted leaves saved; waits for the other ranks only if all stopped."""
        autosave = self._autosave
        if autosave is None or self._stepper.num_steps == self._first_step:
            return []
        if autosave.stopped_step is None:
            return [describe_nothing_saved(self._saved)]
        try:
            lines = self.end_run()
        except (CheckpointError, RuntimeError) as error:  # a rank may have died meanwhile
            return [f"stopped after step {autosave.stopped_step}, which was not saved: {error}"]
        if autosave.problem is not None:
            return [*lines, f"stopped after step {autosave.stopped_step}, which was not saved: {autosave.problem}"]
        return [*lines, f"stopped after step {autosave.stopped_step}: --resume auto goes on from there"]

    def skip_first_batches(self, dataloader: DataLoader[T], num_batches: int = 0) -> Skipping:
        """Return what iterates a prepared loader without its first batches of this rank; they are not read.

        After `load_state` there is no need to: a prepared loader goes on by itself. Every rank must call.
        """
        return skip_first_batches(dataloader, num_batches)

    def wait_for_checkpoint(self) -> None:
        """Wait until a save in the background is complete; every rank must call. Raises `CheckpointError`."""
        self._state.wait()

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load objects with ``state_dict`` and ``load_state_dict`` too, in the order in which they came."""
        self._state.register(objects)

    def register_save_state_pre_hook(self, hook: SaveHook) -> HookHandle:
        """Call ``hook(models, weights, url)`` before each save; what it takes out of ``weights`` is not saved.

        ``url`` is the folder that is being written (of an object store: where the checkpoint will be). What the hook
        writes there becomes part of the checkpoint, and is found by `register_load_state_pre_hook`.
        """
        return self._state.add_save_hook(hook)

    def register_load_state_pre_hook(self, hook: LoadHook) -> HookHandle:
        """Call ``hook(models, url)`` before each load; what it takes out of ``models`` is not loaded."""
        return self._state.add_load_hook(hook)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return a copy of a model's whole state dict; every rank must call if the model is divided among them.

        ``unwrap`` may be anything: keys are those of the plain model.
        """
        state = self._strategy.read_state(Bundle((model,)))["models"][0]
        return dict(whole_weights(state, self._comm))

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "5GB",
        safe_serialization: bool = True,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Write a model's weights as safetensors that other libraries load; rank 0 writes.

        With ``dtype``, such as ``torch.bfloat16``, they are rounded to it on their way. Of a model that is divided
        every rank must call: one tensor at a time is whole on the other ranks, and the tensors of one file,
        ``max_shard_size``, on rank 0. Otherwise the other ranks do not wait; `wait_for_everyone` before they read.

        Raises `MisuseError` for ``safe_serialization=False``, which would be pickles.
        """
        if not safe_serialization:
            raise MisuseError(
                "save_model(safe_serialization=False) is not served: it would write pickles. Leave it out for "
                "safetensors, or write torch.save(accelerator.get_state_dict(model), PATH) on the main process"
            )
        is_divided = self._strategy.capabilities.shards_params
        if not is_divided and not self.is_main_process:
            return
        files = WeightFiles(save_directory, max_shard_size, dtype)
        state = self._strategy.read_state(Bundle((model,)), copied=False)["models"][0]
        for name, value in whole_weights(distinct(state, find_tied(model)), self._comm):
            if self.is_main_process:
                files.add(name, value)
        if is_divided:
            self._on_main(files.finish)
        else:
            files.finish()

    def save(self, obj: Any, path: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Write plain values and tensors on rank 0: ``.safetensors``, ``.json``, else what ``weights_only`` loads.

        With ``safe_serialization`` it is safetensors, whatever the ending. Every rank may call, or rank 0 alone; the
        others do not wait: `wait_for_everyone` before they read the file.
        """
        if self.is_main_process:
            save_plain(obj, path, as_safetensors=safe_serialization)

    # --- between ranks ---

    def gather(self, tensor: T) -> T:
        """Return every rank's tensors joined along the first dim, in rank order; first dims may differ.

        Tensors may be nested in tuples, lists, mappings and dataclasses, and go in one message. A scalar becomes a
        tensor of one value for each rank. Every rank must call; raises `MisuseError` on all of them if structures,
        dtypes or other dims differ.
        """
        return self._collectives.gather(tensor)

    def gather_for_metrics(self, input_data: T, use_gather_object: bool = False) -> T:
        """Gather what was computed from a prepared loader's batch: each sample once, in the loader's order.

        Call it inside of the loop, for each batch; every rank must. Samples that were only filled in are left out. A
        tensor that has as many rows for a short batch as for the one before it, such as ``loss.repeat(BATCH_SIZE)``, is
        cut to the samples of the batch. What was computed from a batch that every rank has read whole, as in an
        evaluation in a plain cell, is not gathered. With ``use_gather_object``, or where there is no tensor, values
        travel as JSON, and lists are joined.
        """
        caller = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        site = caller.f_code, caller.f_lasti
        share, reading = self._stepper.window.share, self._preparer.whole_reading
        if reading.lasts(share):
            if self._world.size > 1:
                known = reading.num_samples
                return input_data if known is None else cut_to_samples(input_data, known, self._row_history, site)
            known = reading.num_samples
            share = None if known is None else Share(known, known, is_last=False, is_filler=False)
        if self._metric_owners is None:
            self._metric_owners = self._find_owners()
        return gather_for_metrics(
            input_data, self._comm, self._collectives, share, self._metric_owners, self._row_history, site,
            as_objects=use_gather_object,
        )  # fmt: skip

    def gather_object(self, value: Any) -> list[Any]:
        """Return every rank's value in a list; if all are lists, their items in one list, as the known API does.

        Values are plain Python, NumPy arrays and tensors (which come back on the CPU); nothing is pickled. Every rank
        must call; raises `MisuseError` on all of them if one brings another type.
        """
        values = self._collectives.gather_objects(value)
        if all(isinstance(item, list) for item in values):
            return [item for items in values for item in items]
        return values

    def broadcast_object_list(self, values: list[Any], from_process: int = 0) -> list[Any]:
        """Replace the items of a list by those of one rank's, in place, and return it; see `gather_object`."""
        values[:] = self._collectives.broadcast_object(values, from_process)
        return values

    def reduce(self, tensor: T, reduction: Operation = "sum", scale: float = 1.0) -> T:
        """Return the sum, mean, maximum or minimum over ranks, times ``scale``; every rank must call.

        Shapes must be equal on all ranks; the option ``debug`` makes sure of it.
        """
        return self._collectives.reduce(tensor, reduction, scale)

    def broadcast(self, tensor: T, from_process: int = 0) -> T:
        """Return one rank's tensors on every rank; shapes and dtypes must be equal. Every rank must call."""
        return self._collectives.broadcast(tensor, from_process)

    def scatter(self, tensor: T | None, from_process: int = 0) -> T:
        """Return this rank's share of one rank's tensors, divided along the first dim; every rank must call.

        Shares differ by at most one. The other ranks give None, or the same structure, to get back their own types.
        """
        return self._collectives.scatter(tensor, from_process)

    def pad_across_processes(self, tensor: T, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> T:
        """Return tensors padded along ``dim`` to the longest on any rank; every rank must call."""
        return self._collectives.pad_across(tensor, dim, pad_index, pad_first=pad_first)

    def set_trigger(self) -> None:
        """Set a flag that every rank sees at its next `check_trigger`; sends nothing and may be called by any rank."""
        self._trigger.set()

    def check_trigger(self, *, wait: bool = True) -> bool:
        """Return whether any rank has set the flag, the same on every rank, and reset it; every rank must call.

        Ranks compare a number of four bytes on their hosts: no device is waited for. A flag that was set before a
        check is seen by that check. With ``wait=False`` ranks do not wait for each other either: a check starts a
        comparison in the background and returns what the one before has found, so a flag is seen one check later. All
        ranks must give the same ``wait``.
        """
        return self._trigger.check(wait=wait)

    # --- telling ---

    @contextmanager
    def profile(
        self,
        profile_handler: ProfileKwargs | str | os.PathLike[str] | None = None,
        *,
        output_trace_dir: str | os.PathLike[str] | None = None,
        activities: Iterable[str] | None = None,
        schedule_option: Mapping[str, int] | Callable[[int], Any] | None = None,
        on_trace_ready: Callable[[Profiler], None] | None = None,
        record_shapes: bool | None = None,
        profile_memory: bool | None = None,
        with_stack: bool | None = None,
        with_flops: bool | None = None,
        with_modules: bool | None = None,
    ) -> Generator[Profiler, None, None]:
        """Profile the block with torch's profiler; every rank must enter, and waits for all at the end.

        Args:
            profile_handler: How to profile, as one record, or just the folder; none given: the record among the
                accelerator's ``kwargs_handlers``. The arguments that follow replace fields of it.
            output_trace_dir: Folder for ``trace_rank<R>.json``, in Chrome's format; made if it is missing.
            activities: ``cpu``, ``cuda``, ...; by default all that are supported here.
            schedule_option: ``wait``, ``warmup``, ``active``, ``repeat`` and ``skip_first``, or a schedule of torch's.
                Call ``step()`` on the profiler then; each cycle writes ``trace_rank<R>_step<N>.json``.
            on_trace_ready: Called with the profiler when a trace is ready.
            record_shapes: Record the shapes of operators' inputs.
            profile_memory: Record allocations.
            with_stack: Record source lines.
            with_flops: Estimate floating point operations.
            with_modules: Record the module hierarchy.

        Raises `MisuseError` for a folder that cannot be written, an unknown activity or part of a schedule.
        """
        changes: dict[str, Any] = {
            "output_trace_dir": output_trace_dir,
            "activities": None if activities is None else list(activities),
            "schedule_option": schedule_option,
            "on_trace_ready": on_trace_ready,
            "record_shapes": record_shapes,
            "profile_memory": profile_memory,
            "with_stack": with_stack,
            "with_flops": with_flops,
            "with_modules": with_modules,
        }
        handler = profile_handler if isinstance(profile_handler, ProfileKwargs) else self._profile_handler
        if profile_handler is not None and handler is not profile_handler:
            changes["output_trace_dir"] = profile_handler
        handler = replace(handler, **{name: value for name, value in changes.items() if value is not None})
        with profiled(handler, self.process_index) as profiler:
            yield profiler
        self.wait_for_everyone()

    def report(self, chosen: Collection[int] | None = None) -> None:
        """Tell the sink what this rank runs with: the receipt, with the objects ``chosen`` by id, or all."""
        facts = self.describe(chosen)
        self._sink.emit(
            Prepared(
                rank=self._world.rank,
                time=time.time(),
                device=facts["device"],
                strategy=facts["strategy"],
                precision=facts["precision"],
                objects=tuple(facts["objects"]),
                notes=tuple(facts["notes"]),
            )
        )

    @property
    def has_diverged(self) -> bool:
        """Whether the ranks draw random numbers of their own since this accelerator divided a loader."""
        return self._stepper.has_diverged

    def diverge(self) -> None:
        """Before the first batch of a divided loader: give ranks above 0 numbers of their own; dropout must not repeat.

        As long as no loader is divided every rank trains on the same, and must draw the same. The order of a divided
        loader is rank 0's all the same.
        """
        if self._stepper.has_diverged:
            return
        self._stepper.has_diverged = True
        place = self._data_place
        if place.rank > 0:
            rng.set_seed(rng.derive(int(torch.randint(2**62, ())), "rank", place.rank))

    def note_equal_rng(self) -> None:
        """Hear that every rank has the same random numbers again."""
        self._stepper.has_diverged = False

    def describe(self, chosen: Collection[int] | None = None) -> dict[str, Any]:
        """Return what this rank runs with, as the receipt shows it, with the objects ``chosen`` by id, or all."""
        preparer = self._preparer
        objects = [item for item in preparer.objects if chosen is None or id(item) in chosen]
        namespace = self._stepper.namespace or vars(sys.modules["__main__"])
        names = {id(value): name for name, value in namespace.items() if not name.startswith("_")}
        return {
            "rank": self._world.rank,
            "num_processes": self._world.size,
            "device": str(self._device),
            "strategy": self._strategy.name,
            "strategy_options": self._strategy.describe(),
            "precision": self.mixed_precision,
            "accumulate": self.gradient_accumulation_steps,
            "objects": [
                describe_object(item, names.get(id(item)), preparer.batches)
                for item in objects
                if not isinstance(item, nn.Module) or any(True for _ in item.parameters())
            ],
            "notes": self._notes(objects),
        }

    def close(self, *, is_alone: bool = False) -> None:
        """Give everything back as it came and leave the world; may be called again.

        Every rank must call if a save is in the background, unless ``is_alone``: a rank that is gone is not waited for.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._state.close(is_alone=is_alone)
        finally:
            self.end_training()
            self._stepper.flush()
            self._preparer.release(self._preparer.objects)
            self._strategy.close()
            if self._group is not None:
                self._group.close()

    def __reduce__(self) -> Any:
        """Refuse to be copied or pickled: it belongs to this process and to what it has prepared."""
        raise MisuseError(
            "an Accelerator belongs to its process and can be neither copied nor sent: build it inside of the function "
            "that is launched, and leave it out of what is copied"
        )

    def __repr__(self) -> str:
        place = f"rank {self._world.rank} of {self._world.size} on {self._device}"
        return f"Accelerator({place}, strategy={self._strategy.name!r}, mixed_precision={self.mixed_precision!r})"

    # --- inner workings ---

    @property
    def _data_place(self) -> World:
        """This rank's place among those that read data of their own: ranks that share a model must draw the same."""
        index, count = self._strategy.data_coords()
        return World(rank=index, size=count)

    def _find_owners(self) -> list[int]:
        """Return, for each share of the data, the first rank that reads it; every rank must call, once."""
        index, count = self._strategy.data_coords()
        if count == self._world.size:
            return list(range(count))
        indices = [int(found) for found in self._comm.all_gather(torch.tensor([index]))]
        return [indices.index(number) for number in range(count)]

    def _prepare(
        self,
        objects: Sequence[Any],
        *,
        batch: BatchMeaning,
        is_training: Callable[[], bool],
        begins_training: Callable[[DataLoader[Any]], bool],
    ) -> list[Any]:
        """Prepare and return what was new."""
        if self._is_closed:
            raise MisuseError("this Accelerator is closed; build a new one")
        before = set(map(id, self._preparer.objects))
        if self._planner is not None and not (self._stepper.bundle.models or self._stepper.bundle.optimizers):
            self._plan(self._planner, objects, batch)
        self._stepper.keeps_sums = batch == "global" and self._world.size > 1
        self._preparer.prepare(objects, batch=batch, is_training=is_training, begins_training=begins_training)
        return [item for item in self._preparer.objects if id(item) not in before]

    def _plan(self, planner: Planner, objects: Sequence[Any], batch: BatchMeaning) -> None:
        """Take the strategy that suits the first models; nothing may be prepared yet."""
        kinds = Kinds.of(objects)
        if not kinds.models:
            return
        choice = planner.choose(kinds.outermost_models(), kinds.optimizers, kinds.loaders, batch)
        self._plan_line = None if choice is None else choice.line
        base = choose(AUTO, self._world, self._registry).name
        options = {"strategy": base, **({} if choice is None else choice.options)}
        if options == self._chosen:
            return
        self._chosen = options
        config = with_options(self._resolved.config, options)
        precision = self._strategy.precision
        self._strategy.close()
        self._strategy = self._registry.get(config.strategy)(getattr(config, config.strategy, None), precision)
        self._strategy.open(self._world, self._comm)
        self._stepper.follow(self._strategy)
        self._recomputer.is_on = config.activation_checkpointing

    def _notes(self, objects: Sequence[Any]) -> list[str]:
        notes = notes_on(objects, self._world.size, self._device, self._preparer.whole)
        if self._plan_line is not None:
            notes.insert(0, self._plan_line)
        models = [item for item in objects if isinstance(item, nn.Module)]
        notes += [] if self._float8 is None else [line for model in models for line in self._float8.describe(model)]
        notes += filter(None, map(self._compiler.describe, models))
        notes += filter(None, map(self._recomputer.describe, models))
        if models:
            notes += [f"{name} {value}" for name, value in self._strategy.describe().items()]
        if self._preparer.has_early_schedule and "schedule" not in self._resolved.given:
            notes.append(
                f"schedules advance once for each optimizer step: --schedule samples for one that was computed from a "
                f"loader's length before prepare, {self._data_place.size} times as long"
            )
        if self.gradient_accumulation_steps > 1:
            notes.append(f"accumulate {self.gradient_accumulation_steps} batches for one step")
        if self._resolved.config.clip is not None:
            notes.append(f"clip {self._resolved.config.clip:g}")
        wanted = self._resolved.config.precision
        if wanted == "auto":
            notes.append(f"precision auto is {choose_precision(wanted, self._device)} on this device")
        if self._resolved.config.data.non_blocking and self._device.type != "cuda":
            notes.append(f"non_blocking has no effect: batches stay on the {self._device.type}")
        if self.mixed_precision == "bf16" and not has_real_bf16(self._device):
            notes.append("bf16 is emulated on this device, and slow: fp16 is faster")
        return notes

    def _on_main(self, write: Callable[[], None]) -> None:
        """Run on rank 0; what it raises there, every rank raises."""
        problem: Exception | None = None
        if self.is_main_process:
            try:
                write()
            except Exception as error:  # told to the others before it is raised
                problem = error
        told = self._comm.broadcast_json(None if problem is None else str(problem))
        if problem is not None:
            raise problem
        if told is not None:
            raise CheckpointError(f"rank 0: {told}")


def _resolve(
    config: Mapping[str, Any] | str | os.PathLike[str] | None, arguments: Mapping[str, Any], records: Sequence[Any]
) -> Resolved:
    if isinstance(config, str | os.PathLike):
        config = {"config": os.fspath(config)}
    own = layers_of(config, arguments, records)
    if not own and (known := ambient_config()) is not None:
        return known
    return resolve([*(ambient_layers() or [environment_layer(option_variables())]), *own])


def _noting(saved: list[Saved], sink: Sink, rank: int) -> Callable[[Saved], None]:
    """Return what notes a checkpoint that is complete; does not refer to the accelerator."""

    def note(item: Saved) -> None:
        saved.append(item)
        if rank == 0:
            url, cost = redact(item.url), item.cost
            sink.emit(CheckpointSaved(rank, item.step, time.time(), url, cost.stall_s, cost.write_s, cost.num_bytes))

    return note


_BATCH: Mapping[bool | None, BatchMeaning | None] = {None: None, True: "global", False: "per-worker"}


def _always() -> bool:
    return True
