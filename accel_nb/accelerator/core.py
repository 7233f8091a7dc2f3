"""`Accelerator`: the public interface of training, with the names of Hugging Face accelerate."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from enum import Enum
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from accel_nb.accelerator.checkpoint_methods import CheckpointMethods
from accel_nb.accelerator.collective_methods import CollectiveMethods
from accel_nb.accelerator.components import build_components
from accel_nb.accelerator.description import describe_run, report_run
from accel_nb.accelerator.options.fsdp_plugin import FullyShardedDataParallelPlugin
from accel_nb.accelerator.options.plugins import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DeepSpeedPlugin,
    GradientAccumulationPlugin,
    OptionPlugin,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
    argument_or_field,
    refuse_unsupported,
)
from accel_nb.accelerator.prepare.preparer import LoopPolicy, TrainingLoops
from accel_nb.accelerator.process.memory_release import release_memory
from accel_nb.accelerator.settings import read_settings
from accel_nb.accelerator.state_properties import StateProperties
from accel_nb.accelerator.tracking.metrics import RowHistory
from accel_nb.accelerator.tracking.run_tracking import TrackingMixin
from accel_nb.accelerator.training.join import join_uneven, override_even_batches
from accel_nb.accelerator.training.pipeline import TrainingPipeline
from accel_nb.accelerator.training.profiling import Profiler, profiled
from accel_nb.accelerator.training.trigger import Trigger
from accel_nb.config import Resolved
from accel_nb.config.sections import AutocastOptions
from accel_nb.data.loader import BatchSizeMeaning, is_sharded
from accel_nb.errors import ConfigError, MisuseError
from accel_nb.precision import build_precision
from accel_nb.precision.forward import plain_view_in_precision
from accel_nb.runtime.distributed import sharded
from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.runtime.distributed.held_gradients import gradient_of, is_held
from accel_nb.runtime.process.built_accelerators import register_built_accelerator
from accel_nb.runtime.tensors.stepped import stepped_parameters
from accel_nb.runtime.world import World
from accel_nb.strategies import StrategyRegistry
from accel_nb.telemetry.events import EventSink

T = TypeVar("T")


class Accelerator(StateProperties, CheckpointMethods, CollectiveMethods, TrackingMixin):
    """Prepares models, optimizers, schedulers and loaders to train on all devices of its world.

    Every rank builds one and makes the same calls. Accelerators share no state: several may exist at the same time, if
    each has its own objects. Options that are not given have the values of the cell's flags, or the defaults.

    Args:
        mixed_precision: ``no``, ``bf16``, ``fp16``, ``fp8``, or ``auto`` for the best that the device supports.
        gradient_accumulation_steps: Micro-batches of each optimizer step.
        cpu: Train on the CPU even if there is a GPU.
        strategy: A strategy's name, or ``auto``.
        seed: Seed of Python, NumPy and torch; when a loader is divided, each rank derives its own stream from it.
        clip: Total norm to clip gradients to before each step.
        batch: Whether a loader's batch size is that of each worker (``per-worker``) or of all together (``global``).
        config: Further options by name, such as ``{"ddp": {"find_unused_parameters": True}}``, or the path of a
            YAML file with options.
        device_placement: Move models, optimizer state and batches to this rank's device.
        split_batches: The same as ``batch``: True is ``global``, False is ``per-worker``.
        step_scheduler_with_optimizer: False advances schedulers at each call, even if no optimizer step was made.
        rng_types: Generators whose state rank 0 sends to all ranks when a loader's epoch begins: ``python``,
            ``numpy``, ``torch``, ``cuda``. The state of a loader's own ``generator`` is always sent.
        dataloader_config: How loaders are read: the ``data`` section of the options, with accelerate's names.
        gradient_accumulation_plugin: How gradients are accumulated, with accelerate's names.
        dynamo_backend: Backend of torch.compile for prepared models.
        dynamo_plugin: Options of torch.compile, with accelerate's names.
        kwargs_handlers: At most one each of `AORecipeKwargs`, `AutocastKwargs`,
            `DistributedDataParallelKwargs`, `GradScalerKwargs`, `InitProcessGroupKwargs` and `ProfileKwargs`.
        project_dir: Folder of the run.
        project_config: Folders of the run, with accelerate's names.
        comm: The communicator of ranks that are connected already; by default one is made from the environment.
        world: This process's rank, world size and device, if neither the environment nor ``comm`` provides them.
        sink: Receives the events of training; by default the cell's sink.
        registry: The strategies to choose from; by default those that are installed.
        log_with: Trackers to which `log` writes in addition to the panel, after `init_trackers`: ``jsonl``,
            ``tensorboard``, ``wandb``, ``mlflow``, ``comet_ml``, ``clearml``, ``aim``, ``swanlab``, ``trackio``,
            ``dvclive``, one that another package installs, ``all`` that are installed, a tracker of your own, or a
            list of these.
        deepspeed_plugin: Train with DeepSpeed's ZeRO; accelerate's names, or DeepSpeed's own configuration.
        fsdp_plugin: Train with FSDP2; accelerate's names.
        deepspeed_plugins: Not supported: there is one configuration. This and the arguments below raise an error.
        megatron_lm_plugin: Degrees of a mesh, with Megatron-LM's names.
        torch_tp_plugin: The number of workers that compute each layer together, with accelerate's name.
        parallelism_config: The sizes of a mesh; accelerate's names, from `accel_nb.compat`.

    Raises `ConfigError`, which lists every problem, for invalid values and for arguments that contradict each other.
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
        batch: BatchSizeMeaning | None = None,
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
        sink: EventSink | None = None,
        registry: StrategyRegistry | None = None,
        log_with: Any = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        deepspeed_plugin: DeepSpeedPlugin | None = None,
        deepspeed_plugins: object = None,
        megatron_lm_plugin: OptionPlugin | None = None,
        torch_tp_plugin: OptionPlugin | None = None,
        parallelism_config: OptionPlugin | None = None,
    ) -> None:
        refuse_unsupported(
            {"deepspeed_plugins": deepspeed_plugins, "megatron_lm_plugin": megatron_lm_plugin,
             "torch_tp_plugin": torch_tp_plugin}
        )  # fmt: skip
        arguments = {
            "precision": mixed_precision, "accumulate": gradient_accumulation_steps, "strategy": strategy,
            "seed": seed, "clip": clip,
            "batch": argument_or_field("batch", batch, "split_batches", _batch_of(split_batches)),
            "compile.backend": dynamo_backend and str(getattr(dynamo_backend, "value", dynamo_backend)).lower(),
        }  # fmt: skip
        plugins = (dataloader_config, gradient_accumulation_plugin, dynamo_plugin, deepspeed_plugin, fsdp_plugin,
                   parallelism_config, megatron_lm_plugin, torch_tp_plugin)  # fmt: skip
        self._settings = settings = read_settings(
            arguments, config=config, step_scheduler_with_optimizer=step_scheduler_with_optimizer, log_with=log_with,
            handlers=kwargs_handlers, plugins=plugins, project=project_config, project_dir=project_dir,
            sharding_plugin=fsdp_plugin or deepspeed_plugin,
        )  # fmt: skip
        self.components = parts = build_components(
            self, settings, comm=comm, world=world, cpu=cpu, sink=sink, registry=registry,
            moves_objects=device_placement, rng_types=rng_types,
        )  # fmt: skip
        self._world, self._comm, self._collectives = parts.world, parts.comm, parts.collectives
        self._device, self._sink, self._stepper, self._tracked = parts.device, parts.sink, parts.stepper, parts.tracked
        self._project, self._tracker_choice = settings.project, settings.trackers
        self._trigger, self._row_history, self._is_closed = Trigger(parts.comm), RowHistory(), False
        if settings.options.checkpoint.dir is not None or settings.options.checkpoint.resume is not None:
            register_built_accelerator(self)

    # --- settings ---

    @property
    def resolved(self) -> Resolved:
        """The options, each with its origin."""
        return self._settings.resolved

    @property
    def has_optimizers(self) -> bool:
        """Whether an optimizer has been prepared."""
        return bool(self._stepper.bundle.optimizers)

    @property
    def has_interrupted_backward(self) -> bool:
        """Whether an error interrupted a backward pass; models must then be prepared again."""
        return self._stepper.has_interrupted_backward

    @property
    def has_whole_gradients(self) -> bool:
        """Whether gradients are averaged over all ranks: not of open windows, nor scaled, nor incomplete.

        Those of explicit cells that the strategy holds are not in ``parameter.grad`` for any code.
        """
        strategy, window = self._stepper.strategy, self._stepper.window
        mesh = self.components.groups.mesh
        if not self._stepper.bundle.models:
            return True
        holder = self._stepper.gradient_holder
        if window.size > 1 or strategy.precision.policy.loss_scaling:
            return holder is None and self._stepper.has_used_gradients and mesh.has_one_dimension
        if holder is not None and (holder.has_incomplete_gradients or not self._stepper.is_plain_cell):
            return False
        return mesh.has_one_dimension

    @property
    def prepared_objects(self) -> tuple[Any, ...]:
        """All prepared objects, in the order in which they were prepared."""
        return tuple(self.components.preparer.objects)

    def complete_state(self) -> None:
        """Complete the state before it is read, as by entries that only other ranks have; every rank must call."""
        self._stepper.strategy.complete_state()

    def sharded_tensors(self) -> list[Tensor]:
        """Return the sharded parameters and tensors of optimizer state, in the same order on every rank."""
        bundle = self._stepper.bundle
        found = [value for model in bundle.models for value in model.parameters()]
        for optimizer in bundle.optimizers:
            entries = [optimizer.state.get(value, {}) for value in stepped_parameters(optimizer)]
            found += [value for values in entries for value in values.values()]
        return [value for value in found if sharded.is_sharded(value)]

    def parameters_with_partial_gradients(self) -> list[Tensor]:
        """Return the parameters of prepared models, if their gradients are not averaged over all ranks."""
        if self.has_whole_gradients:
            return []
        return [value for model in self._stepper.bundle.models for value in model.parameters()]

    @property
    def holds_gradients(self) -> bool:
        """Whether there are gradients that the strategy holds outside of ``parameter.grad``."""
        holder = self._stepper.gradient_holder
        return holder is not None and holder.has_gradients

    def held_gradients(self) -> list[Tensor]:
        """Return this rank's shards of complete gradients that the strategy holds, in the same order on every rank."""
        parameters = [value for model in self._stepper.bundle.models for value in model.parameters() if is_held(value)]
        return [gradient for value in parameters if (gradient := gradient_of(value)) is not None]

    def complete_held_gradients(self) -> None:
        """Complete the gradients that the strategy holds, at the end of a plain cell; every rank must call."""
        if self._stepper.is_plain_cell:
            self._stepper.complete_held_gradients()

    def memory_map(self) -> dict[str, int]:
        """Return this rank's bytes of parameters (with buffers), gradients and optimizer state at the last measurement.

        The first optimizer step is measured, and later ones at most five times a second.
        """
        return self._stepper.memory_bytes

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    # --- training ---

    def prepare(self, *objects: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Change models, optimizers, schedulers and loaders in place to train on this world; return the same objects.

        The objects are prepared jointly, so pass everything that is trained together in one call. Objects of other
        types are returned unchanged. Every rank must call; all ranks receive rank 0's weights.

        An object that another accelerator has prepared is released from that one first.

        ``device_placement`` sets for each object whether it (a loader's batches) is moved to this rank's device; for
        None the accelerator's own ``device_placement`` applies. Raises `MisuseError` if its length is not the number
        of objects.
        """
        if device_placement is not None and len(device_placement) != len(objects):
            raise MisuseError(
                f"prepare was given {len(objects)} objects and {len(device_placement)} values of device_placement; "
                "pass one for each object, or leave it out"
            )
        placing = {
            id(item): bool(is_placed)
            for item, is_placed in zip(objects, device_placement or (), strict=False)
            if is_placed is not None
        }
        preparer = self.components.preparer
        with preparer.override_placement(placing):
            is_new = self.prepare_jointly(
                objects, batch=self._settings.options.batch or "per-worker", loops=TrainingLoops(preparer)
            )
        if is_new:
            self.report()
        return objects[0] if len(objects) == 1 else objects

    def prepare_jointly(self, objects: Sequence[Any], *, batch: BatchSizeMeaning, loops: LoopPolicy) -> list[Any]:
        """Prepare objects, and return those that were not prepared before; every rank must call.

        ``batch`` is the meaning of a loader's batch size, and ``loops`` decides which loops train. Internal to
        accel_nb: scripts call `prepare`.
        """
        if self._is_closed:
            raise MisuseError("this Accelerator is closed; build a new one")
        parts = self.components
        before = set(map(id, parts.preparer.objects))
        parts.selection.select(objects, batch, parts.stepper, parts.recomputer)
        parts.stepper.weights.preserves_sums = batch == "global" and self._world.size > 1
        parts.preparer.prepare(objects, batch=batch, loops=loops)
        return [item for item in parts.preparer.objects if id(item) not in before]

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare one model; see `prepare`.

        With ``evaluation_mode`` the model is only moved to the device and set to the run's precision: for a model that
        is not trained, such as a teacher. Then not all ranks need to call.
        """
        if evaluation_mode:
            with self.components.preparer.override_placement(
                {} if device_placement is None else {id(model): device_placement}
            ):
                self.components.preparer.prepare_for_evaluation(model, self.components.strategy.precision)
            return model
        return self.prepare(model, device_placement=[device_placement])

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> torch.optim.Optimizer:
        """Prepare one optimizer; see `prepare`."""
        return self.prepare(optimizer, device_placement=[device_placement])

    def prepare_scheduler(self, scheduler: torch.optim.lr_scheduler.LRScheduler) -> Any:
        """Prepare one scheduler; its optimizer must be prepared. See `prepare`."""
        return self.prepare(scheduler)

    def prepare_data_loader(
        self, data_loader: DataLoader[T], device_placement: bool | None = None, slice_fn_for_dispatch: None = None
    ) -> DataLoader[T]:
        """Prepare one loader; see `prepare`.

        ``slice_fn_for_dispatch`` may only be None: a dispatched batch is divided along the first dim of each tensor.
        """
        if slice_fn_for_dispatch is not None:
            raise MisuseError(
                "slice_fn_for_dispatch is not supported: a dispatched batch is divided along the first dim of each "
                "tensor; leave it out, and divide other data with split_between_processes"
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

        Without ``weight`` the loss must be the mean over this rank's samples. With ``weight`` it is a sum, and
        ``weight`` is the number of summands, such as the number of tokens that are not padding. The window's gradient
        is then the sum over all micro-batches and ranks, divided by the sum of all weights, as in one big batch. This
        takes one collective of one number for each window. A weight may be a tensor on the device, for which this rank
        does not wait.

        Raises `MisuseError` if the loss is not a tensor or has no gradient, and if some losses of a window have weights
        and others have none.
        """
        self._stepper.meter.name_loss(sys._getframe(1), loss)  # pyright: ignore[reportPrivateUsage]
        if weight is not None:
            self._stepper.backward(loss, weight, retain_graph=bool(retain_graph), create_graph=create_graph)
        elif retain_graph is None and not create_graph:
            self._stepper.backward(loss)
        else:
            self._stepper.backward(loss, retain_graph=bool(retain_graph), create_graph=create_graph)

    def pipeline(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Tensor],
        *,
        schedule: Literal["gpipe", "1f1b", "zero_bubble"] = "1f1b",
    ) -> TrainingPipeline:
        """Return an object that computes the gradients of a prepared model in stages (``mesh.pp``) by a schedule.

        ``pipeline.step(x, target=y)`` takes the place of ``loss = loss_fn(model(x), y)`` and `backward`, and returns
        the loss. ``1f1b`` keeps the activations of fewer micro-batches than a plain loop, which computes as ``gpipe``;
        ``zero_bubble`` computes gradients of weights while a stage would wait. With ``mesh.stages_per_rank`` above 1
        these are the interleaved schedules. Every rank must call, with the same arguments.

        Raises `MisuseError` if the model is not prepared, and for unknown schedules.
        """
        return TrainingPipeline(self._stepper, self._comm, model, loss_fn, schedule)

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Return the context of one micro-batch; the last of each window averages gradients and steps optimizers.

        By default a loader's last batch closes the window too. ``models`` is accepted for compatibility: the context
        applies to all prepared models.
        """
        return self._stepper.window

    def no_sync(self, model: nn.Module | None = None) -> AbstractContextManager[None]:
        """Return a context in which gradients are not averaged over ranks."""
        return self._stepper.without_sync(self._stepper.bundle.models if model is None else [model])

    @contextmanager
    def trigger_sync_in_backward(self, model: nn.Module) -> Generator[None, None, None]:
        """Average the model's gradients in the backward passes of the block, even if their forward was in `no_sync`.

        Gradients that each rank has accumulated before are averaged too, before the next step at the latest.
        """
        self.components.strategy.grad_sync(model, True)
        try:
            yield
        finally:
            self._stepper.update_sync([model])

    def join_uneven_inputs(
        self, joinables: Sequence[Any] | None = None, even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """Return a context in which ranks may run out of data at different times; every rank must enter it.

        A rank that reaches the end of the block early waits there and takes part in the steps of the other ranks. The
        gradient of a step is the mean over the batches of that step, on the ranks that have one: as in one process with
        these batches. At the end all ranks have the models, optimizers and schedulers of a rank that made every step.

        Gradients are averaged at each step instead of during backward, which is slower, so put only the training loop
        into the block. Call gather and reduce after the block: inside of it they raise `MisuseError`, since a rank
        without data does not take part. Batches of an accumulation window that no rank closes are dropped.

        Prepared loaders give every rank the same number of batches, so the block is needed for other data only.

        ``joinables`` is accepted for compatibility: all prepared objects take part. ``even_batches`` replaces the
        option `data.even_batches` in iterations of prepared loaders that begin inside of the block: False divides each
        sample once. With True, loaders repeat samples until all ranks have equally many, and ranks do not wait for each
        other: data that is not from prepared loaders must have the same number of batches on every rank, and gather
        and reduce may be called.
        """
        if even_batches is not None and not isinstance(even_batches, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise MisuseError(f"even_batches is {even_batches!r}; it must be True, False or None")
        loaders = [item for item in self.prepared_objects if is_sharded(item)]
        if even_batches:
            return override_even_batches(loaders, True)
        strategy = self.components.strategy
        if not strategy.capabilities.supports_local_gradients:
            raise MisuseError(
                f"uneven inputs cannot be joined under the strategy {strategy.name!r}, since each rank holds shards "
                "of the model; prepare the loader, so that every rank reads as many batches"
            )
        return self._join(loaders if even_batches is False else [])

    @contextmanager
    def _join(self, exact_loaders: Sequence[Any]) -> Generator[None, None, None]:
        with override_even_batches(exact_loaders, False), join_uneven(self._stepper, self._comm, self._collectives):
            yield

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return a context that computes in the run's precision; prepared models need none.

        ``autocast_handler`` replaces options of the run in this context only.
        """
        if autocast_handler is None:
            return self.components.strategy.precision.autocast()
        changes = {name.removeprefix("autocast."): value for name, value in autocast_handler.as_options().items()}
        options = AutocastOptions.model_validate({**self._settings.options.autocast.model_dump(), **changes})
        return build_precision(self.mixed_precision, self._device, autocast=options).autocast()

    def clip_grad_norm_(self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip gradients to a total norm and return the norm before clipping; in an open window do not clip."""
        return self._stepper.clip_norm(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Clip gradient elements to ``[-clip_value, clip_value]``; do nothing in an open window."""
        self._stepper.clip_value(parameters, clip_value)

    def unscale_gradients(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Divide the gradients of one optimizer, or of all, by the loss scale, so that they can be read."""
        for known in self._stepper.bundle.optimizers if optimizer is None else [optimizer]:
            self.components.strategy.unscale(known)

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return a model of the original class with the same weights; the model itself stays prepared.

        Both share their attributes. `free_memory` releases the model itself from the accelerator.

        With ``keep_fp32_wrapper=False`` the returned model does not compute in the run's precision, and with
        ``keep_torch_compile=False`` it is not compiled. The latter raises `MisuseError` if the model's blocks are
        compiled, since both models share them.
        """
        parts = self.components
        if not keep_torch_compile and parts.compiler.has_compiled_blocks(model):
            raise MisuseError(
                f"the blocks of this {type(model).__name__} are compiled, and the plain model shares them: "
                "free_memory(model) restores the model without compiled code, or set compile.regional to false"
            )
        precision = parts.strategy.precision if keep_fp32_wrapper and model in parts.preparer else None
        return plain_view_in_precision(
            model, precision, keeps_inner=keep_torch_compile and parts.compiler.has_compiled_whole(model)
        )

    def free_memory(self, *objects: Any) -> list[None]:
        """Restore objects, by default all, to their state before `prepare`, and free cached device memory.

        Return one None for each object, to assign to the names that reference the objects.
        """
        self.components.preparer.release(objects or self.components.preparer.objects)
        return release_memory(*objects)

    def clear(self, *objects: Any) -> list[None]:
        """Restore objects and free cached device memory, as `free_memory` does."""
        return self.free_memory(*objects)

    def verify_device_map(self, model: nn.Module) -> bool:
        """Return whether the model is placed on several devices by a device map; such a model cannot be prepared."""
        maps = (getattr(module, "hf_device_map", None) for module in model.modules())
        return any(
            isinstance(found, Mapping) and len(set(cast("Mapping[str, Any]", found).values())) > 1 for found in maps
        )

    # --- the run ---

    def checkpoint_every(self, steps: int | None = None, *, seconds: float | None = None) -> None:
        """Save in the background after a number of steps or seconds; with neither, only when a checkpoint is requested.

        A checkpoint is saved when a loop over a prepared loader requests its next batch, to ``step_N`` in
        ``checkpoint.dir``. Every rank must call. Raises `MisuseError` if that option is not set.
        """
        self.components.run.save_every(steps, seconds)

    def request_checkpoint(self) -> None:
        """Request a checkpoint at the end of a step, from any rank or signal handler. Needs ``checkpoint.dir``."""
        self.components.run.request_checkpoint()

    def request_stop(self) -> bool:
        """Request that every rank saves and raises KeyboardInterrupt at the end of the same step. Thread-safe.

        Return False if no end of a step is expected soon on this rank, or if ``checkpoint.dir`` is not set.
        """
        return self.components.run.request_stop()

    def begin_run(self, resume: str | None = None) -> None:
        """Begin a cell or script: epochs are counted from here; for ``resume`` see the option ``checkpoint.resume``.

        The steps of a plain cell count from 1. If it writes or resumes checkpoints, their step numbers continue.

        With ``resume``, the checkpoint is loaded when the first loop that trains begins, and loops over epochs that are
        complete in the checkpoint yield no batches.
        """
        self.components.run.begin(resume)

    def end_run(self) -> list[str]:
        """Wait for the background save, and return lines about the resumed and saved checkpoints."""
        return self.components.run.end()

    def fingerprint(self) -> str | None:
        """Return a digest of the weights trained since `begin_run`; ranks with the same weights have the same digest.

        None if nothing was trained, or if the ranks hold different shards.
        """
        return self.components.run.fingerprint()

    def end_interrupted_pass(self) -> None:
        """Restore the state between two passes, after an error in the middle of one; waits for no other rank."""
        self._stepper.strategy.end_interrupted_pass()

    def discard_window(self) -> bool:
        """Drop the gradients of an open accumulation window; return whether there was one. Every rank must call."""
        return self._stepper.discard_window()

    def end_interrupted_run(self) -> list[str]:
        """Return lines about an interrupted run's checkpoints; waits for the other ranks only if all have stopped."""
        return self.components.run.end_interrupted()

    # --- reports ---

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
        """Profile the block with torch's profiler; every rank must enter it, and waits for all ranks at the end.

        Args:
            profile_handler: A `ProfileKwargs`, or the folder for traces; by default the `ProfileKwargs` among the
                accelerator's ``kwargs_handlers``. The arguments below replace its fields.
            output_trace_dir: Folder for ``trace_rank<R>.json``, in Chrome's format; made if it is missing.
            activities: ``cpu``, ``cuda``, ...; by default all that this machine supports.
            schedule_option: ``wait``, ``warmup``, ``active``, ``repeat`` and ``skip_first``, or a schedule of torch's
                profiler. Then call ``step()`` on the profiler; each cycle writes ``trace_rank<R>_step<N>.json``.
            on_trace_ready: Called with the profiler when a trace is ready.
            record_shapes: Record the shapes of operators' inputs.
            profile_memory: Record allocations.
            with_stack: Record source lines.
            with_flops: Estimate floating point operations.
            with_modules: Record the module hierarchy.

        Raises `MisuseError` for a folder that cannot be written, an unknown activity or an unknown field of a schedule.
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
        handler = profile_handler if isinstance(profile_handler, ProfileKwargs) else self._settings.profile
        if profile_handler is not None and handler is not profile_handler:
            changes["output_trace_dir"] = profile_handler
        handler = replace(handler, **{name: value for name, value in changes.items() if value is not None})
        with profiled(handler, self.process_index) as profiler:
            yield profiler
        self.wait_for_everyone()

    def report(self, chosen: Collection[int] | None = None) -> None:
        """Send the description of this rank for the receipt, with the objects whose ids are in ``chosen``, or all."""
        report_run(self.components, chosen)

    @property
    def has_rank_rng(self) -> bool:
        """Whether each rank draws different random numbers, because this accelerator has divided a loader."""
        return self._stepper.has_rank_rng

    def note_equal_rng(self) -> None:
        """Record that all ranks have the same random state again; every rank must call."""
        self._stepper.has_rank_rng = False

    def describe(self, chosen: Collection[int] | None = None) -> dict[str, Any]:
        """Return the description of this rank for the receipt, with the objects whose ids are in ``chosen``, or all."""
        return describe_run(self.components, chosen)

    def close(self, *, is_alone: bool = False) -> None:
        """Restore all prepared objects to their state before `prepare`, and close the process group; repeatable.

        If a background save is running, every rank must call. With ``is_alone`` this rank does not wait for the others,
        which may have ended.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self.components.close(is_alone=is_alone)

    def __reduce__(self) -> Any:
        """Raise `MisuseError`: an accelerator is bound to its process and its prepared objects."""
        raise MisuseError(
            "an Accelerator belongs to its process and can be neither copied nor sent: build it inside of the function "
            "that is launched, and leave it out of what is copied"
        )

    def __repr__(self) -> str:
        place = f"rank {self._world.rank} of {self._world.size} on {self._device}"
        strategy = self.components.strategy.name
        return f"Accelerator({place}, strategy={strategy!r}, mixed_precision={self.mixed_precision!r})"


def _batch_of(split_batches: object) -> BatchSizeMeaning | None:
    if split_batches is None:
        return None
    if not isinstance(split_batches, bool):
        raise ConfigError(f"split_batches={split_batches!r} was given to Accelerator(...); it must be True or False")
    return "global" if split_batches else "per-worker"
