"""`Accelerator` with the interface of accelerate: order of arguments, shared states, private names.

`accel_nb.Accelerator` does the training. This class adds accelerate's interface and its semantics of schedulers.
"""

from __future__ import annotations

import math
import os
import warnings
import weakref
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from accel_nb.accelerator import Accelerator as OwnAccelerator
from accel_nb.accelerator.process_state import DistributedType
from accel_nb.accelerator.tracking.run_tracking import number_of
from accel_nb.accelerator.training.join import override_even_batches
from accel_nb.checkpoint.shared_errors import run_on_main
from accel_nb.compat.arguments import accumulation_steps, add_defaults, is_set, precision_of, project_of
from accel_nb.compat.checkpoint_folders import CheckpointFolders, call_hooks_apart
from accel_nb.compat.data.epochs import count_epochs, set_iteration
from accel_nb.compat.deepspeed.engine import DeepSpeedEngine, model_of
from accel_nb.compat.deepspeed.plugin import DeepSpeedPlugin
from accel_nb.compat.deepspeed.prepare import choose_plugin, require_options, steps_of_plugin, without_placeholders
from accel_nb.compat.hf_utils import parse_flag_from_env, save
from accel_nb.compat.kwargs_handlers import HANDLER_NAMES, REFUSED_HANDLERS
from accel_nb.compat.plugins import (
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    ProjectConfiguration,
)
from accel_nb.compat.prepared_classes import (
    LOADER_EVENTS,
    AcceleratedOptimizer,
    AcceleratedScheduler,
    add_members,
    do_nothing,
)
from accel_nb.compat.states import AcceleratorState, GradientState, world_of_variable
from accel_nb.compat.trackers import LOGGER_TYPE_TO_CLASS, registered_names, require_folder
from accel_nb.errors import MisuseError
from accel_nb.runtime.distributed.gradients import fill_missing_gradients
from accel_nb.runtime.tensors.instance_patching import patch_instance, plain_class

_UNSET: Any = object()
_NO_ARGUMENTS = ("self", "options", "__class__")


class Accelerator(OwnAccelerator):
    """`accel_nb.Accelerator` with accelerate's arguments and attributes; see `docs/migration.md` for what differs."""

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: Any = _UNSET,
        mixed_precision: Any = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: Sequence[Any] | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[Any] | None = None,
        dynamo_backend: Any = None,
        dynamo_plugin: Any = None,
        deepspeed_plugins: Any = None,
        parallelism_config: Any = None,
        **options: Any,
    ) -> None:
        given = {name: value for name, value in locals().items() if value is not _UNSET}
        # A copy is built from these.
        self._arguments = {name: value for name, value in given.items() if name not in _NO_ARGUMENTS} | options
        self.project_configuration = project_of(project_config, project_dir)
        self.gradient_accumulation_plugin = gradient_accumulation_plugin
        precision = precision_of(mixed_precision)
        num_steps = accumulation_steps(gradient_accumulation_steps, gradient_accumulation_plugin)
        chosen: Any
        named_plugins: dict[str, DeepSpeedPlugin]
        chosen, named_plugins = choose_plugin(
            deepspeed_plugin, deepspeed_plugins, str(getattr(precision, "value", precision) or "no")
        )
        if isinstance(chosen, DeepSpeedPlugin):
            num_steps = steps_of_plugin(chosen, num_steps)
            if gradient_accumulation_plugin is not None:
                gradient_accumulation_plugin = replace(gradient_accumulation_plugin, num_steps=num_steps)
        own_trackers = self._record_registered_trackers(log_with)
        config = options["config"] = add_defaults(options.get("config"), step_scheduler_with_optimizer)
        if parse_flag_from_env("ACCELERATE_USE_FSDP") and not (
            fsdp_plugin or chosen or options.get("strategy") or is_set("strategy", config)
        ):
            fsdp_plugin = FullyShardedDataParallelPlugin()
        if "world" not in options and "comm" not in options:
            options["world"] = world_of_variable(cpu)
        super().__init__(
            mixed_precision=precision,
            gradient_accumulation_steps=num_steps,
            cpu=cpu,
            device_placement=device_placement,
            split_batches=None if split_batches is _UNSET else split_batches,
            step_scheduler_with_optimizer=None if step_scheduler_with_optimizer else False,
            rng_types=[kind for kind in rng_types or () if str(getattr(kind, "value", kind)) != "generator"] or None,
            dataloader_config=dataloader_config,
            gradient_accumulation_plugin=gradient_accumulation_plugin,
            dynamo_backend=dynamo_backend,
            dynamo_plugin=dynamo_plugin,
            kwargs_handlers=kwargs_handlers,
            project_config=self.project_configuration,
            log_with=own_trackers,
            fsdp_plugin=fsdp_plugin,
            deepspeed_plugin=cast("Any", chosen),
            megatron_lm_plugin=megatron_lm_plugin,
            torch_tp_plugin=torch_tp_plugin,
            parallelism_config=parallelism_config,
            **options,
        )
        if isinstance(fsdp_plugin, FullyShardedDataParallelPlugin):
            fsdp_plugin.follow_precision(self.mixed_precision)
        self._plugin_options = chosen.as_options() if named_plugins else None
        self._train_as_accelerate(checks_losses=is_set("sentinels", config))
        self._set_handlers(kwargs_handlers or ())
        self.parallelism_config_given = parallelism_config
        self.step_scheduler_with_optimizer, self.rng_types = step_scheduler_with_optimizer, rng_types
        self.device_placement, self.dataloader_config = device_placement, dataloader_config or DataLoaderConfiguration()
        self.dynamo_plugin = dynamo_plugin
        self.flag_tensor: Tensor | None = None
        self._custom_objects: list[Any] = []
        self._shared = AcceleratorState()
        self._shared.set_from(
            super().state,
            fsdp_plugin=fsdp_plugin,
            deepspeed_plugins=chosen if "" in named_plugins else named_plugins or chosen,
            parallelism_config=parallelism_config,
            device_mesh=self._build_mesh(),
            dynamo_plugin=dynamo_plugin,
            _cpu=cpu,
        )
        self._gradient_state = GradientState(gradient_accumulation_plugin)
        reference = weakref.ref(self)  # the shared state keeps no accelerator alive
        self._gradient_state.bind(
            self._stepper.window, lambda: () if (found := reference()) is None else found._dataloaders
        )

    def _record_registered_trackers(self, log_with: Any) -> list[Any] | None:
        """Store the names of registered trackers in ``log_with``; return the other trackers, or None."""
        require_folder(log_with, self.project_configuration.logging_dir)
        self._registered = registered_names(log_with)
        if not self._registered:
            return log_with
        given = list(log_with) if isinstance(log_with, list | tuple) else [log_with]
        return [item for item in given if item not in self._registered] or None

    def _train_as_accelerate(self, *, checks_losses: bool) -> None:
        """Accumulate gradients, and accept losses that are NaN, as accelerate does."""
        self._collectives.keeps_scalars = True
        self._stepper.window.rescales_short_windows = False
        self._stepper.window.counts_blocks_only = True
        if not checks_losses:
            # Programs for accelerate handle NaN losses themselves, and step optimizers that were not prepared.
            self._stepper.meter.allow_nan()
            self._stepper.refuses_unprepared = False

    def _set_handlers(self, handlers: Sequence[Any]) -> None:
        """Set an attribute for each class of handlers: the given handler, or None."""
        vars(self).update(dict.fromkeys((*HANDLER_NAMES.values(), *REFUSED_HANDLERS)))
        for item in handlers:
            known = [kind.__name__ for kind in type(item).__mro__ if kind.__name__ in HANDLER_NAMES]
            vars(self).update({HANDLER_NAMES[name]: item for name in known[:1]})

    def _build_mesh(self) -> Any:
        """Return the device mesh of the parallelism config; None without one. Every rank must call.

        It is built with the accelerator, since any rank may read it later.
        """
        config = self.parallelism_config
        if config is None:
            return None
        config.check_world(self._world.size)
        return config.build_device_mesh(self.device.type, getattr(self.components.strategy, "device_mesh", None))

    def __reduce__(self) -> Any:
        """Copy an accelerator: a new one with the same arguments prepares copies of its prepared objects."""
        return _rebuild, (type(self), self._arguments, self.prepared_objects, tuple(self._custom_objects))

    # --- states ---

    @property
    def state(self) -> AcceleratorState:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The shared state of the process; after a reset its fields raise AttributeError until it is built again."""
        return self._shared

    @property
    def num_processes(self) -> int:
        """The number of processes, from the shared state."""
        return self.state.num_processes

    @property
    def gradient_state(self) -> GradientState:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The shared state of accumulation."""
        return self._gradient_state

    @property
    def distributed_type(self) -> DistributedType:
        """The kind of training, from the shared state."""
        return self.state.distributed_type

    @property
    def parallelism_config(self) -> Any:
        """The mesh sizes that were passed, or None."""
        return self.parallelism_config_given

    @property
    def torch_device_mesh(self) -> Any:
        """The device mesh of ``parallelism_config``, with the process groups of the strategy; None without one."""
        return self.state.device_mesh

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether prepared loaders are copies of torchdata's class."""
        return bool(self.dataloader_config.use_stateful_dataloader)

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch ends its accumulation window, so that optimizers step."""
        return self._gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, sync_gradients: bool) -> None:
        self._gradient_state._set_sync_gradients(sync_gradients)

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one rank."""
        return self._world.size > 1

    @property
    def is_fsdp2(self) -> bool:
        """Whether FSDP trains; here it is always FSDP2."""
        return self.state.is_fsdp2

    @property
    def fp8_backend(self) -> str | None:
        """``AO`` (torchao) under fp8, else None."""
        return "AO" if self.mixed_precision == "fp8" else None

    @property
    def fp8_enabled(self) -> bool:
        """Whether models compute in fp8."""
        return self.mixed_precision == "fp8"

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """DeepSpeed's configuration; empty if DeepSpeed does not train."""
        return getattr(self.state.deepspeed_plugin, "deepspeed_config", None) or {}

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether FSDP shards the model."""
        return self.is_fsdp2

    @property
    def data_parallel_rank(self) -> int:
        """The index of the share of the data that this process reads."""
        return self.components.data_world.rank

    @property
    def data_parallel_shard_rank(self) -> int:
        """The index of this process among those that hold shards of one model."""
        return self._world.rank if self.is_fsdp2 else 0

    @property
    def tensor_parallel_rank(self) -> int:
        """The index of this process among those that compute each layer together."""
        return self.components.groups.mesh.index("tp")

    @property
    def pipeline_parallel_rank(self) -> int:
        """The index of this process among those that hold stages of one model; 0 without pipeline parallelism."""
        return self.components.groups.mesh.index("pp")

    @property
    def context_parallel_rank(self) -> int:
        """The index of this process among those that hold shards of one sequence; 0 without context parallelism."""
        return self.components.groups.mesh.index("cp")

    # --- prepared objects ---

    @property
    def _models(self) -> list[nn.Module]:
        return [item for item in self.prepared_objects if isinstance(item, nn.Module)]

    @property
    def _optimizers(self) -> list[Optimizer]:
        return [item for item in self.prepared_objects if isinstance(item, Optimizer)]

    @property
    def _schedulers(self) -> list[Any]:
        return [item for item in self.prepared_objects if isinstance(item, LRScheduler | ReduceLROnPlateau)]

    @property
    def _dataloaders(self) -> list[DataLoader[Any]]:
        return [item for item in self.prepared_objects if isinstance(item, DataLoader)]

    def prepare(self, *args: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Prepare objects in place and return them; see `accel_nb.Accelerator.prepare`."""
        size = self.num_processes  # first: raises an error if the shared state was reset
        plugin, placement = self.state.deepspeed_plugin, list(device_placement or [None] * len(args))
        args, per_step = tuple(map(model_of, args)), []
        if isinstance(plugin, DeepSpeedPlugin):
            require_options(plugin, self._plugin_options, args)
            args, per_step = without_placeholders(args, self, plugin)
        for item in args:
            refuse_offloaded_quantized(item)
        if self.use_stateful_dataloader:
            from accel_nb.compat.data.data_loaders import stateful_copy

            args = tuple(stateful_copy(item) if type(item) is DataLoader else item for item in args)
            preparer = self.components.preparer  # streams without a state are read again, as by torchdata
            preparer.data = preparer.data.model_copy(update={"resume_stream": "replay"})
        at_once = [at for at, item in enumerate(args) if item not in per_step]
        super().prepare(*(args[at] for at in at_once), device_placement=[placement[at] for at in at_once])
        if per_step:
            self._prepare_per_step(per_step)
        for item in args:
            if isinstance(item, DataLoader):
                vars(item).update(gradient_state=self._gradient_state, **dict.fromkeys(LOADER_EVENTS, do_nothing))
                count_epochs(item)
            if isinstance(item, nn.Module | Optimizer | LRScheduler | ReduceLROnPlateau | DataLoader):
                mark_prepared(item, self, 1 if item in per_step else self._schedule_stride)
            if isinstance(item, nn.Module) and size > 1 and not hasattr(item, "no_sync"):
                # In accelerate these models are wrapped in DDP, which has this method.
                patch_instance(item, {"no_sync": self.no_sync}, plain_class(item))
        if isinstance(plugin, DeepSpeedPlugin):
            config = plugin.deepspeed_config
            args = tuple(DeepSpeedEngine(item, self, config) if isinstance(item, nn.Module) else item for item in args)
        return args[0] if len(args) == 1 else args

    def _prepare_per_step(self, schedules: Sequence[LRScheduler]) -> None:
        """Prepare schedules that advance by one in each optimizer step, whatever the number of processes."""
        preparer = self.components.preparer
        preparer.schedule, kept = "steps", preparer.schedule
        try:
            super().prepare(*schedules)
        finally:
            preparer.schedule = kept

    @property
    def _schedule_stride(self) -> int:
        """The number of scheduler steps that one call of a prepared scheduler's ``step`` makes."""
        options = self._settings.options
        is_ahead = options.schedule == "samples" and options.batch != "global"
        return self.components.strategy.data_coords()[1] if is_ahead else 1

    def was_step_skipped(self, optimizer: Any) -> bool:
        """Return whether the latest step of an optimizer was skipped because gradients overflowed."""
        proxy = self._stepper.optimizer_proxies.get(id(optimizer))
        return proxy is not None and proxy.was_skipped

    def free_memory(self, *objects: Any) -> list[None]:
        """Restore prepared objects to their state before `prepare`, and free cached memory.

        Models that were prepared for evaluation stay prepared: trainers prepare a reference model once, and later call
        this method.
        """
        self.components.preparer.drop_evaluated()
        super().free_memory()
        return [None] * len(objects)

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Return the context of one micro-batch; inside it optimizers step if it is the last one of its window."""
        self._gradient_state._set_sync_gradients(True)
        return super().accumulate(*models)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Compute gradients; a tensor loss is divided by the accumulation steps."""
        kwargs.pop("learning_rate", None)
        if not kwargs.pop("scale_wrt_gas", True):  # DeepSpeed's argument for a loss that is divided already
            loss = loss * self.gradient_accumulation_steps
        super().backward(loss, **kwargs)

    def lomo_backward(self, loss: Tensor, learning_rate: float) -> None:
        """Raise an error: optimizers that step inside of backward are not prepared."""
        raise MisuseError(
            "lomo_backward steps inside of the backward pass, which prepared optimizers do not; train with another "
            "optimizer, and activation_checkpointing or strategy='fsdp' for less memory"
        )

    @contextmanager
    def maybe_context_parallel(
        self, buffers: Any = None, buffer_seq_dims: Any = None, no_restore_buffers: Any = None
    ) -> Generator[None, None, None]:
        """Do nothing: attention layers shard their sequences themselves, so ``buffers`` stay whole."""
        yield

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: nn.Module) -> Any:
        """Raise an error: sequences are not divided by DeepSpeed here."""
        raise MisuseError("sequences are not divided by DeepSpeed here; use cp_size of the parallelism config")

    @contextmanager
    def trigger_sync_in_backward(self, model: nn.Module) -> Generator[None, None, None]:
        """Average the model's gradients over ranks at the end of the ``with`` block, including accumulated ones.

        Code after the block may read them.
        """
        with super().trigger_sync_in_backward(model):
            yield
        if self._world.size > 1 and self.components.strategy.capabilities.replicates:
            parameters = [value for value in model.parameters() if value.requires_grad]
            for gradient in fill_missing_gradients(self._comm, parameters):
                gradient.copy_(self._comm.all_reduce(gradient.detach().clone(), "mean"))

    def join_uneven_inputs(
        self, joinables: Sequence[Any] | None = None, even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """Return a context for uneven inputs; without ``even_batches`` the accelerator's own value decides.

        With ``even_batches`` all ranks have equally many batches: nothing is joined, and collectives are allowed inside
        of the context. If ranks cannot be joined, a warning says why, and only ``even_batches`` has an effect.
        """
        if even_batches is None and self.even_batches:
            even_batches = True
        problem = None if even_batches or not self.use_distributed else self._reason_not_to_join()
        if problem is None:
            return super().join_uneven_inputs(joinables, even_batches)
        warnings.warn(f"join_uneven_inputs does not join the ranks: {problem}", stacklevel=2)
        return override_even_batches(self._dataloaders if even_batches is False else [], False)

    def _reason_not_to_join(self) -> str | None:
        sharded = (DistributedType.FSDP, DistributedType.DEEPSPEED)
        if self.distributed_type in sharded or not self.components.strategy.capabilities.supports_local_gradients:
            return "each holds shards of the model, which all ranks need in each step"
        return None if self._optimizers else "no optimizer is prepared"

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip gradients to a total norm and return the norm before clipping.

        Under DeepSpeed this only measures, and steps clip to the norm of its configuration.
        """
        if self._plugin_options is not None:
            if "clip" not in self._plugin_options:
                warnings.warn(
                    "clip_grad_norm_ only measures under DeepSpeed: set gradient_clipping in its configuration to clip",
                    stacklevel=2,
                )
            max_norm = math.inf
        return super().clip_grad_norm_(parameters, max_norm, norm_type)

    def unwrap_model(self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """Return the model inside of a wrapper; except with DeepSpeed a prepared model has none."""
        from accel_nb.compat.models.model_parts import extract_model_from_parallel

        return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)

    # --- trackers ---

    def init_trackers(self, project_name: str, config: Any = None, init_kwargs: Any = None) -> None:
        """Begin a run with the trackers of ``log_with``, and with trackers that were registered by name."""
        options: dict[str, Any] = dict(init_kwargs or {})
        has_objects = any(not isinstance(item, str) for item in self._tracker_choice)
        if self.is_main_process:
            made: list[Any] = []
            for name in self._registered:
                kind: Any = LOGGER_TYPE_TO_CLASS[name]
                folder = (self.logging_dir,) if kind.requires_logging_directory else ()
                made.append(kind(project_name, *folder, **options.pop(name, {})))
            self._tracker_choice = (*self._tracker_choice, *made)
            self._registered = []
        super().init_trackers(project_name, config, options)
        if has_objects and self._tracked.thread is not None:
            self._tracked.thread.wait_started()  # programs call methods of the objects that they have made

    def log(self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Any = None) -> None:
        """Log values by name. None is left out; without a running tracker, only numbers are logged."""
        kept = {name: value for name, value in values.items() if value is not None}
        if self._tracked.thread is None:
            kept = {name: value for name, value in kept.items() if number_of(value) is not None}
        super().log(kept, step, log_kwargs)

    def _tracked_step(self, step: int | None) -> int | None:
        """Return the step for trackers: None if it was not given, so that each tracker counts its own steps."""
        return step

    # --- files ---

    @property
    def _are_ranks_equal(self) -> bool:
        """Whether each rank holds the whole state: no weights are sharded, and no gradients are accumulated."""
        is_sharded = self.components.strategy.capabilities.shards_params
        return self._world.size > 1 and not is_sharded and not self._stepper.window.num_pending

    @property
    def _folders(self) -> CheckpointFolders:
        return CheckpointFolders(self.project_configuration)

    @property
    def project_dir(self) -> str | os.PathLike[str] | None:
        """Folder of the run, or None."""
        return self.project_configuration.project_dir

    @property
    def save_iteration(self) -> int:
        """The number of the next checkpoint that is named automatically."""
        return self.project_configuration.iteration

    @property
    def should_save_model(self) -> bool:
        """Whether this process writes the files of a full model."""
        return self._world.is_local_main if self.project_configuration.save_on_each_node else self._world.is_main

    def save_state(
        self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = True, **options: Any
    ) -> str:
        """Save the state of the training; with automatic naming to ``checkpoints/checkpoint_N`` of the project folder.

        If every rank has a copy of the weights, only the main process saves, and the others need not call: where they
        do, they call the hooks. Random states of the main process are saved; those of other ranks are derived when the
        checkpoint is loaded. With automatic naming every rank must call, and the oldest checkpoints beyond
        ``total_limit`` are removed once the new one is complete.
        """
        folders, newest = self._folders, None
        if folders.is_automatic:
            output_dir = newest = folders.next_folder()
        elif output_dir is None:
            raise ValueError("save_state needs output_dir, or ProjectConfiguration(automatic_checkpoint_naming=True)")
        is_alone = not folders.is_automatic and options.get("blocking", True) and self._are_ranks_equal
        if is_alone and self.is_main_process:
            found = self.components.state.save(output_dir, blocking=True, is_alone=True)
        elif is_alone:
            found = os.fspath(output_dir)
            call_hooks_apart(self.components.state, self.process_index)
        else:
            found = super().save_state(output_dir, safe_serialization, **options)
        self.project_configuration.iteration += 1
        if newest is not None:
            run_on_main(self._comm, lambda: folders.remove_oldest(newest))
        return found

    def load_state(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Any = None,
        map_location: Any = None,
        **options: Any,
    ) -> Any:
        """Load a state; without a folder the newest one that was named automatically.

        Tensors are read into those of the prepared objects, which stay on their devices: ``map_location`` and
        ``load_kwargs`` change nothing.
        """
        folders = self._folders
        self.wait_for_everyone()  # the main process may still be writing
        if input_dir is None and folders.is_automatic:
            input_dir = folders.newest()
        elif input_dir is None:
            raise ValueError("load_state needs input_dir, or ProjectConfiguration(automatic_checkpoint_naming=True)")
        elif "://" not in os.fspath(input_dir) and not os.path.isdir(os.path.expanduser(input_dir)):
            raise ValueError(f"load_state: there is no folder {os.fspath(input_dir)!r}")
        report = super().load_state(input_dir, **options)
        for loader in self._dataloaders:
            set_iteration(loader)
        return report

    def save_model(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a model's weights as safetensors, or without ``safe_serialization`` as files of torch.save.

        Offloaded weights are read from where they are.
        """
        from accel_nb.compat.models.weight_files import (
            has_absent_weights,
            read_weights,
            save_offloaded,
            save_with_torch,
        )

        is_offloaded = has_absent_weights(model)
        if safe_serialization:
            if is_offloaded:
                save_offloaded(model, save_directory, max_shard_size, writes=self.should_save_model)
            else:
                super().save_model(model, save_directory, max_shard_size)
            return
        state = dict(read_weights(model)) if is_offloaded else self.get_state_dict(model)
        save_with_torch(state, save_directory, max_shard_size, writes=self.should_save_model)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Add objects with ``state_dict`` and ``load_state_dict`` to checkpoints; raise ValueError for others."""
        lacking = [
            f"object {at}, {item!r}"
            for at, item in enumerate(objects)
            if not hasattr(item, "state_dict") or not hasattr(item, "load_state_dict")
        ]
        if lacking:
            raise ValueError(
                f"objects of a checkpoint have state_dict and load_state_dict; without these are {'; '.join(lacking)}"
            )
        super().register_for_checkpointing(*objects)
        self._custom_objects.extend(objects)

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Write plain values and tensors on the processes that write files."""
        save(obj, f, self.project_configuration.save_on_each_node, safe_serialization)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return a loader without its first batches."""
        from accel_nb.compat.data.data_loaders import skip_first_batches

        return skip_first_batches(dataloader, num_batches)


def _rebuild(
    kind: type[Accelerator],
    arguments: dict[str, Any],
    prepared: tuple[Any, ...],
    registered: tuple[Any, ...],
) -> Accelerator:
    accelerator = kind.__new__(kind)
    Accelerator.__init__(accelerator, **arguments)
    accelerator.prepare(*prepared)
    accelerator.register_for_checkpointing(*registered)
    return accelerator


def refuse_offloaded_quantized(item: Any) -> None:
    """Raise ValueError for a model of bitsandbytes' layers with parts that a map places on the CPU or on disk."""
    from accel_nb.compat.names.availability import is_bitsandbytes_multi_backend_available

    is_quantized = getattr(item, "is_loaded_in_8bit", False) or getattr(item, "is_loaded_in_4bit", False)
    places = getattr(item, "hf_device_map", None) or {}
    away = [name for name, place in places.items() if str(place) in ("cpu", "disk")]
    if isinstance(item, nn.Module) and is_quantized and away and not is_bitsandbytes_multi_backend_available():
        names = ", ".join(name or "the whole model" for name in away)
        raise ValueError(
            f"a model in 8 or 4 bits does not train with CPU or disk offload, and its device map has there: {names}; "
            "load it with a device_map of accelerators only"
        )


def mark_prepared(item: Any, accelerator: Accelerator, stride: int = 1) -> None:
    """Add to a prepared object the members of accelerate's wrapper of it; a schedule advances by ``stride``."""
    if not isinstance(item, LRScheduler):
        vars(item)["_is_accelerate_prepared"] = True
        if isinstance(item, Optimizer):
            add_members(item, AcceleratedOptimizer, accelerator)
        return
    # A scheduler's state dict contains its attributes: set these on its class, which only this scheduler has.
    plain = plain_class(item)
    own_step, methods = type(item).step, {}

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_skipped = getattr(self.optimizer, "_is_overflow", False)  # accelerate's name for a step that was skipped
        total = getattr(self, "total_steps", None)
        is_over = total is not None and self.last_epoch >= total  # accelerate keeps the last rate, and torch raises
        if is_skipped or is_over:
            return
        before = self.last_epoch
        own_step(self, *args, **kwargs)
        # accel_nb ends a schedule at the position of its last step, accelerate one later.
        if total is not None and before < self.last_epoch == total - 1 and self.last_epoch - before < stride:
            plain.step(self, *args, **kwargs)

    if type(item) is not plain:  # the scheduler steps with its optimizer
        methods["step"] = step
    add_members(item, AcceleratedScheduler, accelerator, methods)
    kind: Any = type(item)
    kind._is_accelerate_prepared = True
