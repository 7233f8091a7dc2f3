"""Plugins: dataclasses with the names and fields of `accelerate`, which set options of the schema in `accel_nb.config`.

A field that is None leaves the option of the run unchanged. If a field has no corresponding option,
`OptionPlugin.as_options` raises an error with the reason, when an `Accelerator` is built with the plugin.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from enum import Enum
from typing import Any, Literal, Protocol, cast

from accel_nb.accelerator.options.kwargs_handler import KwargsHandler
from accel_nb.config import Layer
from accel_nb.config.deepspeed_import import import_deepspeed
from accel_nb.config.import_report import ImportReport
from accel_nb.config.yaml_documents import read_document
from accel_nb.errors import ConfigError

_DATA = ("dispatch_batches", "even_batches", "use_seedable_sampler", "data_seed", "non_blocking")


class OptionPlugin(Protocol):
    """An object whose fields are options."""

    def as_options(self) -> dict[str, Any]:
        """Return the options that are given, by their names in the schema."""
        ...


@dataclass
class DataLoaderConfiguration(KwargsHandler):
    """Options of the reading of prepared loaders; None leaves an option of the run unchanged.

    Args:
        split_batches: A loader's batch is divided among all workers (``batch="global"``); False: each worker reads
            whole batches.
        dispatch_batches: Only rank 0 reads, and sends each rank its share.
        even_batches: All ranks read equally many samples, some of them twice; False: each sample once, and gradients
            weighted by the sizes of shares.
        use_seedable_sampler: Shuffle in an order that depends on seed and epoch only.
        data_seed: Seed of that order.
        non_blocking: Copy the next batch to a GPU while the current one is trained on.
        use_stateful_dataloader: Only False: checkpoints contain the position of prepared loaders without it.
    """

    split_batches: bool | None = None
    dispatch_batches: bool | None = None
    even_batches: bool | None = None
    use_seedable_sampler: bool | None = None
    data_seed: int | None = None
    non_blocking: bool | None = None
    use_stateful_dataloader: bool = False

    def as_options(self) -> dict[str, Any]:
        """Return the options that are given, by their names in the schema."""
        if self.use_stateful_dataloader:
            raise ConfigError(
                "use_stateful_dataloader=True from DataLoaderConfiguration(...) is not supported: torchdata's loader "
                "is not used here; leave it out"
            )
        given = {f"data.{name}": getattr(self, name) for name in _DATA}
        if self.split_batches is not None:
            given["batch"] = "global" if self.split_batches else "per-worker"
        return _given(given)


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """Options of gradient accumulation.

    Args:
        num_steps: Micro-batches for one optimizer step.
        adjust_scheduler: Only True: schedulers count optimizer steps.
        sync_with_dataloader: Step at the end of a loader, even if the window is short; False: continue the window in
            the next epoch.
        sync_each_batch: Average gradients over ranks after every micro-batch.
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool | None = None
    sync_each_batch: bool | None = None

    def as_options(self) -> dict[str, Any]:
        """Return the options that are given, by their names in the schema."""
        if not self.adjust_scheduler:
            raise ConfigError(
                "adjust_scheduler=False from GradientAccumulationPlugin(...) is not supported: a prepared scheduler "
                "counts optimizer steps, whatever the accumulation is; to advance it at each call, give "
                "step_scheduler_with_optimizer=False"
            )
        tail = {None: None, True: "step", False: "carry"}[self.sync_with_dataloader]
        return _given(
            {
                "accumulate": self.num_steps,
                "accumulation.tail": tail,
                "accumulation.sync_each_batch": self.sync_each_batch,
            }
        )


@dataclass
class ProjectConfiguration(KwargsHandler):
    """Folders for the files of a run; see also `Accelerator.project_dir` and `Accelerator.logging_dir`.

    Args:
        project_dir: Folder of the run.
        logging_dir: Folder of its logs and traces; by default the folder of the run.
        automatic_checkpoint_naming: Keep checkpoints as ``step_N`` in ``checkpoints`` of the folder of the run.
        total_limit: How many of these checkpoints are kept.
    """

    project_dir: str | os.PathLike[str] | None = None
    logging_dir: str | os.PathLike[str] | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None

    def as_options(self) -> dict[str, Any]:
        """Return the options that are given, by their names in the schema; raises `ConfigError` without a folder."""
        if not self.automatic_checkpoint_naming:
            return _given({"checkpoint.total_limit": self.total_limit})
        if self.project_dir is None:
            raise ConfigError(
                "automatic_checkpoint_naming=True from ProjectConfiguration(...) needs project_dir, the folder to keep "
                "checkpoints in"
            )
        folder = os.path.join(os.fspath(self.project_dir), "checkpoints")
        return _given({"checkpoint.dir": folder, "checkpoint.total_limit": self.total_limit})


@dataclass
class AutocastKwargs(KwargsHandler):
    """Options of torch.autocast, for a whole run or for one block of `Accelerator.autocast`.

    Args:
        enabled: Compute in the run's precision.
        cache_enabled: Cache the low precision copies of weights within one region.
    """

    enabled: bool | None = None
    cache_enabled: bool | None = None

    def as_options(self) -> dict[str, Any]:
        """Return the options that are given, by their names in the schema."""
        return _given({f"autocast.{name}": value for name, value in vars(self).items()})


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Options of the loss scaling of fp16, with PyTorch's names.

    Args:
        init_scale: The initial scale.
        growth_factor: Factor for the scale after ``growth_interval`` steps without overflow.
        backoff_factor: Factor for the scale when gradients overflow.
        growth_interval: Number of steps without overflow after which the scale grows.
        enabled: Scale losses.
    """

    init_scale: float | None = None
    growth_factor: float | None = None
    backoff_factor: float | None = None
    growth_interval: int | None = None
    enabled: bool | None = None

    def as_options(self) -> dict[str, Any]:
        """Return the options that are given, by their names in the schema."""
        return _given({f"scaler.{name}": value for name, value in vars(self).items()})


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Options of the process group, used only if the accelerator opens it.

    Args:
        backend: ``gloo`` or ``nccl``; by default the usual one for the device.
        init_method: Only ``env://``: rank and world size are read from the environment.
        timeout: How long a rank waits for the others.
    """

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None

    def as_options(self) -> dict[str, Any]:
        """Return the options that are given, by their names in the schema."""
        if self.init_method not in (None, "env://"):
            raise ConfigError(
                f"init_method={self.init_method!r} from InitProcessGroupKwargs(...) is not supported: ranks connect by "
                "the variables that torchrun and our own launcher set (env://); leave it out"
            )
        seconds = self.timeout.total_seconds() if isinstance(self.timeout, timedelta) else self.timeout
        return _given({"group.backend": self.backend, "group.timeout": seconds})


class DDPCommunicationHookType(str, Enum):
    """Compression of gradients in communication between ranks; each member equals its value as text."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


_POWER_SGD = {
    "matrix_approximation_rank": "power_sgd_rank",
    "start_powerSGD_iter": "power_sgd_start",
    "min_compression_rate": "power_sgd_min_compression",
    "use_error_feedback": "power_sgd_error_feedback",
    "warm_start": "power_sgd_warm_start",
    "random_seed": "power_sgd_seed",
}


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Options of PyTorch's DistributedDataParallel, with PyTorch's names.

    Args:
        dim: Only 0: batches are divided along their first dim.
        broadcast_buffers: Copy rank 0's buffers to every rank before each forward pass.
        bucket_cap_mb: Size of the gradient buckets, in MiB.
        find_unused_parameters: Search in every backward pass for parameters that got no gradient.
        check_reduction: Only False: PyTorch ignores it.
        gradient_as_bucket_view: Only True: gradients are always views of the buckets, which saves a copy of them.
        static_graph: Assume that every step uses the same parameters in the same order.
        comm_hook: Compression of gradients.
        comm_wrapper: Dtype in which the comm hook's values are sent.
        comm_state_option: Options of PowerSGD, with the names of PyTorch's ``PowerSGDState``.
    """

    dim: int = 0
    broadcast_buffers: bool | None = None
    bucket_cap_mb: int | None = None
    find_unused_parameters: bool | None = None
    check_reduction: bool = False
    gradient_as_bucket_view: bool | None = None
    static_graph: bool | None = None
    comm_hook: DDPCommunicationHookType | str | None = None
    comm_wrapper: DDPCommunicationHookType | str | None = None
    comm_state_option: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def as_options(self) -> dict[str, Any]:
        """Return the options that are given, by their names in the schema."""
        problems = [
            f"{name}={getattr(self, name)!r} from DistributedDataParallelKwargs(...) is not supported: {reason}; leave "
            "it out"
            for name, supported, reason in (
                ("dim", (0,), "batches are divided along their first dim"),
                ("check_reduction", (False,), "PyTorch ignores it"),
                ("gradient_as_bucket_view", (None, True), "gradients are always views of the buckets"),
            )
            if getattr(self, name) not in supported
        ]
        problems += [
            f"comm_state_option {name!r} from DistributedDataParallelKwargs(...) is not supported; there are "
            f"{', '.join(_POWER_SGD)}"
            for name in self.comm_state_option
            if name not in _POWER_SGD
        ]
        if problems:
            raise ConfigError(problems)
        given = {
            "broadcast_buffers": self.broadcast_buffers,
            "bucket_cap_mb": self.bucket_cap_mb,
            "find_unused_parameters": self.find_unused_parameters,
            "static_graph": self.static_graph,
            "comm_hook": enum_value(self.comm_hook),
            "comm_wrapper": enum_value(self.comm_wrapper),
            **{_POWER_SGD[name]: value for name, value in self.comm_state_option.items()},
        }
        return {f"ddp.{name}": value for name, value in _given(given).items()}


@dataclass
class AORecipeKwargs(KwargsHandler):
    """Options of linear layers in 8-bit floating point (``mixed_precision="fp8"``), by torchao.

    Args:
        config: A ``torchao.float8.Float8LinearConfig``, which must equal one of torchao's recipes.
        module_filter_func: Not supported: layers that stay in bf16 are given by name.
        pad_inner_dim: Only True: rows are padded where the hardware needs it.
        enable_fsdp_float8_all_gather: Gather weights in float8 under FSDP2; the recipe tensorwise only.
    """

    config: Any = None
    module_filter_func: Callable[..., bool] | None = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None

    def as_options(self) -> dict[str, Any]:
        """Return the options that are given, by their names in the schema."""
        problems = [
            f"{what} from AORecipeKwargs(...) is not supported: {remedy}"
            for what, is_given, remedy in (
                (
                    "module_filter_func",
                    self.module_filter_func is not None,
                    'name layers that stay in bf16, as config={"fp8": {"skip_modules": ["head"]}}',
                ),
                (
                    "pad_inner_dim=False",
                    self.pad_inner_dim is False,
                    "rows are padded where necessary; leave it out",
                ),
            )
            if is_given
        ]
        recipe = None if self.config is None else _recipe_of(self.config)
        if self.config is not None and recipe is None:
            problems.append(
                "config from AORecipeKwargs(...) is none of torchao's recipes: give one of "
                "Float8LinearConfig.from_recipe_name(...), or its name as fp8.recipe"
            )
        if problems:
            raise ConfigError(problems)
        gathers = self.enable_fsdp_float8_all_gather
        if gathers is None and getattr(self.config, "enable_fsdp_float8_all_gather", False):
            gathers = True
        emulate = getattr(self.config, "emulate", None)
        return _given({"fp8.recipe": recipe, "fp8.emulate": emulate, "fsdp.float8_gather": gathers})


def _recipe_of(config: Any) -> str | None:
    """Return the name of the torchao recipe that a config equals, apart from emulation and padding; else None."""
    normalized = replace(config, emulate=False, pad_inner_dim=False, enable_fsdp_float8_all_gather=False)
    names = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
    kind = cast(Any, type(config))
    return next((name for name in names if kind.from_recipe_name(name) == normalized), None)


@dataclass
class ProfileKwargs(KwargsHandler):
    """Options of `Accelerator.profile`; the fields are described there."""

    activities: Sequence[str] | None = None
    schedule_option: Mapping[str, int] | Callable[[int], Any] | None = None
    on_trace_ready: Callable[[Any], None] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | os.PathLike[str] | None = None

    def as_options(self) -> dict[str, Any]:
        """Return no options: only `Accelerator.profile` uses the fields."""
        return {}


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Options of torch.compile for prepared models.

    Args:
        backend: ``inductor``, ``eager``, ... in upper or lower case; ``no`` compiles nothing.
        mode: The mode of torch.compile.
        fullgraph: Raise an error for models that cannot be compiled as one graph.
        dynamic: Compile for varying shapes; by default when a second shape occurs.
        options: Only None: the run has no option for a backend's options.
        disable: Compile nothing.
        use_regional_compilation: Compile repeated blocks instead of the whole model.
    """

    backend: str | Enum | None = None
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Mapping[str, Any] | None = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def as_options(self) -> dict[str, Any]:
        """Return the options that are given, by their names in the schema."""
        if self.options:
            raise ConfigError(
                "options from TorchDynamoPlugin(...) is not supported: the run has no option for those of a backend; "
                "give mode, or set them in torch._inductor.config"
            )
        backend = "no" if self.disable else enum_value(self.backend)
        return _given(
            {
                "compile.backend": backend.lower() if isinstance(backend, str) else backend,
                "compile.mode": self.mode,
                "compile.fullgraph": self.fullgraph,
                "compile.dynamic": {None: None, True: "yes", False: "no"}[self.dynamic],
                "compile.regional": self.use_regional_compilation,
            }
        )


@dataclass
class DeepSpeedPlugin(KwargsHandler):
    """Selects DeepSpeed's ZeRO as the strategy.

    With one worker nothing is sharded: the options of ZeRO have no effect, and a warning names them.

    Args:
        hf_ds_config: A DeepSpeed configuration: the path of its JSON file, or a dictionary. For a value ``auto`` the
            option of the run is used.
        gradient_accumulation_steps: Micro-batches for one optimizer step.
        gradient_clipping: Total norm to clip gradients to before each step.
        zero_stage: What is sharded: 1 optimizer state, 2 gradients too, 3 parameters too.
        offload_optimizer_device: ``none`` or ``cpu``.
        offload_param_device: ``none`` or ``cpu``; stage 3.
        zero3_init_flag: Only False or None: models are built unsharded, and sharded after that.
        zero3_save_16bit_model: Ignored: `Accelerator.save_model` gathers the weights.
    """

    hf_ds_config: str | os.PathLike[str] | Mapping[str, Any] | None = None
    gradient_accumulation_steps: int | str | None = None
    gradient_clipping: float | str | None = None
    zero_stage: int | None = None
    offload_optimizer_device: str | None = None
    offload_param_device: str | None = None
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool | None = None

    def as_options(self) -> dict[str, Any]:
        """Return the options that are given, by their names in the schema.

        Raises `ConfigError`, which lists all problems, for values of the file without a corresponding option, and for
        arguments that contradict the file.
        """
        found = self.differences()
        problems = [f"{name} of {self._source}: {reason}" for name, reason in found.not_imported.items()]
        if self.zero3_init_flag:
            problems.append(
                "zero3_init_flag=True from DeepSpeedPlugin(...) is not supported: leave it out, and build a model that "
                "is too large under init_empty_weights(), with deepspeed.weights for its values"
            )
        arguments = _given(
            {
                "accumulate": _unless_auto(self.gradient_accumulation_steps),
                "clip": _unless_auto(self.gradient_clipping),
                "deepspeed.zero_stage": self.zero_stage,
                "deepspeed.offload_optimizer": _offloaded(self.offload_optimizer_device),
                "deepspeed.offload_parameters": _offloaded(self.offload_param_device),
            }
        )
        problems += [
            f"{name} is {found.options[name]!r} in {self._source} and {value!r} in DeepSpeedPlugin(...); remove one"
            for name, value in arguments.items()
            if name in found.options and found.options[name] != value
        ]
        if problems:
            raise ConfigError(problems)
        return {"strategy": "deepspeed", **found.options, **arguments}

    def differences(self) -> ImportReport:
        """Return how each value of ``hf_ds_config`` is converted, as a report; print its ``table()``."""
        if self.hf_ds_config is None:
            return ImportReport()
        return import_deepspeed(self.deepspeed_config, self._source)

    @property
    def deepspeed_config(self) -> Mapping[str, Any]:
        """The given configuration as a dictionary; the configuration for DeepSpeed is generated from the options."""
        given = self.hf_ds_config
        return {} if given is None else given if isinstance(given, Mapping) else read_document(given)

    @property
    def _source(self) -> str:
        given = self.hf_ds_config
        return "hf_ds_config" if isinstance(given, Mapping) or given is None else os.fspath(given)


HANDLERS = (
    AORecipeKwargs,
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)
"""Classes of objects in ``kwargs_handlers``; at most one object of each is allowed."""

_REFUSED = {
    "deepspeed_plugins": "several configurations at a time are not supported; give one as deepspeed_plugin",
    "megatron_lm_plugin": "it is not a MegatronLMPlugin of accel_nb; give mesh.tp and mesh.pp in config",
    "torch_tp_plugin": "it is not a TorchTensorParallelPlugin of accel_nb; give mesh.tp in config",
}


def refuse_unsupported(given: Mapping[str, object]) -> None:
    """Raise `ConfigError` for arguments of accelerate that this version does not support."""
    problems = [
        f"{name} was given to Accelerator(...): {_REFUSED[name]}"
        for name, value in given.items()
        if value is not None and not hasattr(value, "as_options")
    ]
    if problems:
        raise ConfigError(problems)


def option_layers(
    config: Mapping[str, Any] | None, arguments: Mapping[str, Any], plugins: Sequence[OptionPlugin | None]
) -> list[Layer]:
    """Return the arguments of an `Accelerator` as layers of options.

    Raises `ConfigError` where plugins and arguments disagree.
    """
    given: list[tuple[str, Mapping[str, Any]]] = [
        ("Accelerator(config=...)", dict(config or {})),
        ("Accelerator(...)", _given({name: enum_value(value) for name, value in arguments.items()})),
        *((f"{type(plugin).__name__}(...)", plugin.as_options()) for plugin in plugins if plugin is not None),
    ]
    layers = [Layer("code", values, source) for source, values in given if values]
    refuse_disagreement(layers)
    return layers


def checked_handlers(handlers: Sequence[object] | None) -> list[Any]:
    """Return ``handlers`` as a list; raises `ConfigError` for an unknown class, and for two objects of one class."""
    found: list[Any] = []
    problems: list[str] = []
    for handler in handlers or ():
        kind = type(handler).__name__
        if not isinstance(handler, HANDLERS):
            known = ", ".join(known.__name__ for known in HANDLERS)
            problems.append(f"kwargs_handlers of Accelerator(...) has a {kind}; it may have {known}")
            continue
        problems += [
            f"kwargs_handlers of Accelerator(...) has two {kind}: {_short(other)} and {_short(handler)}; join them"
            for other in found
            if type(other) is type(handler)
        ]
        found.append(handler)
    if problems:
        raise ConfigError(problems)
    return found


def argument_or_field(name: str, argument: Any, field_name: str, value: Any) -> Any:
    """Return an argument, or else the value of a plugin's field; raises `ConfigError` if both are set and differ."""
    if argument is not None and value is not None and argument != value:
        raise ConfigError(f"{name}={argument!r} and {field_name}={value!r} disagree; remove one of the two")
    return value if argument is None else argument


def enum_value(value: Any) -> Any:
    """Return the value of a member of an enumeration; other values unchanged."""
    return value.value if isinstance(value, Enum) else value


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _unless_auto(value: Any) -> Any:
    return None if value == "auto" else value


def _offloaded(device: str | None) -> str | None:
    return "no" if device == "none" else device


def _short(plugin: Any) -> str:
    """Return the text of a plugin with only the fields that were set."""
    shown = ", ".join(
        f"{item.name}={getattr(plugin, item.name)!r}"
        for item in fields(plugin)
        if getattr(plugin, item.name) not in (item.default, {})
    )
    return f"{type(plugin).__name__}({shown})"


def refuse_disagreement(layers: Sequence[Layer]) -> None:
    """Raise `ConfigError` where two places in code set one option to different values."""
    found: dict[str, tuple[Any, str]] = {}
    problems: list[str] = []
    for layer in layers:
        for name, value in _flat(layer.values):
            other, source = found.setdefault(name, (value, layer.source))
            if other != value:
                problems.append(
                    f"{name}: {other!r} from {source} and {value!r} from {layer.source} disagree; remove one of the two"
                )
    if problems:
        raise ConfigError(problems)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(cast("Mapping[str, Any]", value), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
