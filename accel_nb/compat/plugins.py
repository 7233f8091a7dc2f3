"""Records of options with accelerate's names, fields and order; they become options of accel_nb's schema."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from accel_nb.accelerator.options import fsdp_plugin, plugins
from accel_nb.accelerator.options.fsdp_plugin import PRECISIONS
from accel_nb.compat.hf_utils import TextEnum, parse_flag_from_env, str_to_bool
from accel_nb.compat.models.model_parts import get_module_class_from_name
from accel_nb.compat.states import AcceleratorState
from accel_nb.errors import MisuseError
from accel_nb.runtime.process.environment import get_variable


@dataclass
class DataLoaderConfiguration(plugins.DataLoaderConfiguration):
    """Options of the reading of loaders by `Accelerator.prepare`, with the defaults of accelerate."""

    split_batches: bool | None = False
    dispatch_batches: bool | None = None
    even_batches: bool | None = True
    use_seedable_sampler: bool | None = False
    data_seed: int | None = None
    non_blocking: bool | None = False
    use_stateful_dataloader: bool = False
    custom_classes: Any = None

    def __new__(cls, *args: Any, **kwargs: Any) -> DataLoaderConfiguration:
        """Record which fields are arguments: a default and the same value as an argument have different meanings."""
        made = super().__new__(cls)
        vars(made)["_given"] = {*kwargs, *(item.name for item, _ in zip(fields(cls), args, strict=False))}
        return made

    def as_options(self) -> dict[str, Any]:
        """Return the options that differ from accelerate's defaults, and ``even_batches`` if it is an argument."""
        given = plugins.DataLoaderConfiguration(**{**self.to_kwargs(), "use_stateful_dataloader": False})
        if "even_batches" in vars(self)["_given"]:
            given.even_batches = self.even_batches
        return given.as_options()


@dataclass
class GradientAccumulationPlugin(plugins.GradientAccumulationPlugin):
    """Options of gradient accumulation, with the defaults of accelerate."""

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool | None = True
    sync_each_batch: bool | None = False

    def as_options(self) -> dict[str, Any]:
        """Return the options that are given; ``adjust_scheduler`` only changes a counter of accelerate's schedulers."""
        return plugins.GradientAccumulationPlugin(**(self.to_kwargs() | {"adjust_scheduler": True})).as_options()


@dataclass
class ProjectConfiguration(plugins.ProjectConfiguration):
    """Folders for the files of a run, and the number of the next checkpoint."""

    project_dir: str | os.PathLike[str] | None = None
    logging_dir: str | os.PathLike[str] | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Set the folder of the run, which is also used for logs if they have none."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir

    def as_options(self) -> dict[str, Any]:
        """Return no options: folders are named by `CheckpointFolders`."""
        return {}


@dataclass
class TorchDynamoPlugin(plugins.TorchDynamoPlugin):
    """Options of torch.compile; those that are not given are read from the variables ``ACCELERATE_DYNAMO_...``."""

    def __post_init__(self) -> None:
        prefix = "ACCELERATE_DYNAMO_"
        self.backend = self.backend or get_variable(f"{prefix}BACKEND", None)
        self.backend = getattr(self.backend, "value", self.backend)
        self.backend = self.backend.lower() if isinstance(self.backend, str) else self.backend
        mode: Any = get_variable(f"{prefix}MODE", None)
        self.mode = self.mode or mode
        for name in ("fullgraph", "dynamic", "use_regional_compilation"):
            variable = f"{prefix}USE_{name.removeprefix('use_').upper()}"
            if getattr(self, name) is None and get_variable(variable, ""):
                setattr(self, name, parse_flag_from_env(variable))


@dataclass
class FullyShardedDataParallelPlugin(fsdp_plugin.FullyShardedDataParallelPlugin):
    """Selects FSDP2; values that are not given are read from the variables ``FSDP_...``."""

    def __post_init__(self) -> None:
        for field in fields(self):
            name = field.name.removeprefix("fsdp_")
            text = get_variable(f"FSDP_{_FSDP_VARIABLES.get(name, name).upper()}", "")
            if text and getattr(self, field.name) is None:
                setattr(self, field.name, str_to_bool(text, True) if name in _FSDP_SWITCHES else _read_text(text))
        # Programs read these two to choose how they divide and save models themselves.
        is_second = self.fsdp_version == 2
        self.fsdp_version = self.fsdp_version or 2
        self.state_dict_type = self.state_dict_type or "FULL_STATE_DICT"
        for name in _fsdp_enumerations():
            self._read_member(name)
        if is_second and getattr(self.state_dict_type, "name", None) == "LOCAL_STATE_DICT":
            raise ValueError("FSDP2 has no LOCAL_STATE_DICT: give FULL_STATE_DICT or SHARDED_STATE_DICT")
        self._has_own_policy = self.mixed_precision_policy is not None
        if isinstance(self.mixed_precision_policy, str | dict):
            self.mixed_precision_policy = self._precision_policy(self.mixed_precision_policy)
        if self.fsdp_version == 2 or self.backward_prefetch == "NO_PREFETCH":
            self.backward_prefetch = None
        self.set_cpu_offload()
        self._set_state_dict_configs()

    def _read_member(self, name: str) -> None:
        """Replace the name or number of a member of an enumeration in a field by the member."""
        kind, value = _fsdp_enumerations()[name], getattr(self, name)
        if isinstance(value, str):
            member = kind.__members__.get(value.upper()) or kind.__members__.get(f"_{value.upper()}")
            setattr(self, name, value if member is None else member)
        elif type(value) is int:
            setattr(self, name, kind(value))

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Set what programs that save a model themselves read; checkpoints do not depend on it."""
        self.state_dict_type = state_dict_type or self.state_dict_type
        self._read_member("state_dict_type")
        self._set_state_dict_configs()

    def _set_state_dict_configs(self) -> None:
        """Set torch's options of how state dicts are gathered, unless those of the selected kind are given."""
        from torch.distributed import fsdp

        whole = {"offload_to_cpu": True, "rank0_only": True}
        kinds: dict[Any, tuple[Any, Any, dict[str, bool]]] = {
            fsdp.StateDictType.FULL_STATE_DICT: (fsdp.FullStateDictConfig, fsdp.FullOptimStateDictConfig, whole),
            fsdp.StateDictType.SHARDED_STATE_DICT: (
                fsdp.ShardedStateDictConfig, fsdp.ShardedOptimStateDictConfig, {"offload_to_cpu": True}
            ),
        }  # fmt: skip
        of_model, of_optimizer, values = kinds.get(self.state_dict_type, (None, None, {}))
        if of_model is not None and not isinstance(self.state_dict_config, of_model):
            self.state_dict_config = of_model(**values)
        if of_optimizer is not None and not isinstance(self.optim_state_dict_config, of_optimizer):
            self.optim_state_dict_config = of_optimizer(**values)

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Replace the name of the policy by a function of torch for a model, for programs that wrap one themselves."""
        from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

        named = {
            "TRANSFORMER_BASED_WRAP": transformer_auto_wrap_policy,
            "SIZE_BASED_WRAP": size_based_auto_wrap_policy,
            "NO_WRAP": None,
        }
        policy: Any = self.auto_wrap_policy
        policy = named.get(policy.upper()) if isinstance(policy, str) else policy
        if policy is transformer_auto_wrap_policy:
            names = self.transformer_cls_names_to_wrap or getattr(model, "_no_split_modules", None) or ()
            names = names.split(",") if isinstance(names, str) else names
            policy = functools.partial(policy, transformer_layer_cls={_class_of_layer(model, name) for name in names})
        elif policy is size_based_auto_wrap_policy:
            smallest = self.min_num_params
            policy = functools.partial(policy, min_num_params=smallest) if smallest else None
        self.auto_wrap_policy = policy

    def set_cpu_offload(self) -> None:
        """Replace a boolean by torch's policy of offloading, which programs pass on that shard a model themselves."""
        if isinstance(self.cpu_offload, bool):
            self.cpu_offload = self._offload_policy(self.cpu_offload)

    def _offload_policy(self, is_on: bool) -> Any:
        from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, OffloadPolicy

        if self.fsdp_version == 1:
            return CPUOffload(offload_params=is_on)
        return CPUOffloadPolicy(pin_memory=torch.accelerator.is_available()) if is_on else OffloadPolicy()

    def validate_cpu_offload(self) -> None:
        """Raise ValueError if ``cpu_offload`` is not torch's policy for the version."""
        expected = type(self._offload_policy(False))
        if not isinstance(self.cpu_offload, expected):
            raise ValueError(
                f"cpu_offload is {self.cpu_offload!r}; with fsdp_version={self.fsdp_version} it is a "
                f"{expected.__name__} of torch.distributed.fsdp: give one, or a boolean"
            )

    @property
    def _kind_of_policy(self) -> Any:
        from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

        return MixedPrecision if self.fsdp_version == 1 else MixedPrecisionPolicy

    def _precision_policy(self, value: Any, buffers: torch.dtype | None = None) -> Any:
        """Return torch's policy for a precision, or for a dictionary of dtypes; ``buffers`` is that of buffers."""
        last = "buffer_dtype" if self.fsdp_version == 1 else "output_dtype"
        if isinstance(value, Mapping):
            known = ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype")
            if not {*known[:2]} <= value.keys() <= {*known} or not all(
                item in _DTYPES.values() for item in value.values()
            ):
                raise ValueError(
                    f"mixed_precision_policy has param_dtype, reduce_dtype and {last}, each a dtype of fp16, bf16 or "
                    f"fp32; it is {value}"
                )
            return self._kind_of_policy(**{name: value[name] for name in (*known[:2], last) if name in value})
        dtype = _DTYPES.get(value, value)
        if dtype not in _DTYPES.values():
            raise ValueError(f"mixed_precision_policy={value!r} is none of {', '.join(_DTYPES)}")
        own = buffers if self.fsdp_version == 1 and buffers is not None else dtype
        return self._kind_of_policy(param_dtype=dtype, reduce_dtype=dtype, **{last: own})

    def validate_mixed_precision_policy(self) -> None:
        """Raise ValueError if ``mixed_precision_policy`` is not torch's policy for the version."""
        kind = self._kind_of_policy
        if not isinstance(self.mixed_precision_policy, kind):
            raise ValueError(
                f"mixed_precision_policy is {self.mixed_precision_policy!r}, and no {kind.__name__} of "
                "torch.distributed.fsdp"
            )

    def set_mixed_precision(self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False) -> None:
        """Set the policy that programs read; raises `MisuseError` if an accelerator has another precision."""
        wanted = PRECISIONS.get(mixed_precision, mixed_precision)
        current = AcceleratorState._shared_state.get("mixed_precision")
        if current not in (None, wanted):
            raise MisuseError(
                f"set_mixed_precision({mixed_precision!r}): the accelerator has {current}; give "
                f"Accelerator(mixed_precision={wanted!r}) instead, and fsdp.reduce_dtype for the averages of gradients"
            )
        self._has_own_policy = self._has_own_policy or current is None
        if override or self.mixed_precision_policy is None:
            buffers = torch.float32 if buffer_autocast else None
            self.mixed_precision_policy = self._precision_policy(mixed_precision, buffers)

    def follow_precision(self, precision: str) -> None:
        """Set the policy of an accelerator's precision if none is set; later accelerators do not inherit it."""
        if precision != "no" and self.mixed_precision_policy is None:
            self.mixed_precision_policy = self._precision_policy(precision)

    def as_options(self) -> dict[str, Any]:
        """Return the options that are given; the policy only if a program has set it."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        if not self._has_own_policy:
            values["mixed_precision_policy"] = None
        return fsdp_plugin.FullyShardedDataParallelPlugin(**values).as_options()


_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"fp8": torch.bfloat16, "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
)
"""Dtypes of FSDP's precision policies, by the names of precisions."""


def _class_of_layer(model: nn.Module, name: str) -> type[nn.Module]:
    kind = get_module_class_from_name(model, name.strip())
    if kind is None:
        raise ValueError(
            f"transformer_cls_names_to_wrap has {name.strip()!r}, and no module of {type(model).__name__} is of a "
            "class of that name"
        )
    return kind


_FSDP_VARIABLES = {"cpu_offload": "offload_params", "transformer_cls_names_to_wrap": "transformer_cls_to_wrap"}
"""Fields whose variable has another name."""

_FSDP_SWITCHES = (
    "activation_checkpointing", "cpu_offload", "cpu_ram_efficient_loading", "forward_prefetch", "limit_all_gathers",
    "sync_module_states", "use_orig_params",
)  # fmt: skip


def _fsdp_enumerations() -> dict[str, Any]:
    """Return torch's enumerations of which fields are members; they are given by name or number too."""
    from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy, StateDictType  # slow to import

    return {
        "sharding_strategy": ShardingStrategy, "backward_prefetch": BackwardPrefetch, "state_dict_type": StateDictType
    }  # fmt: skip


def _read_text(text: str) -> bool | int | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return int(text) if text.isdecimal() else text


class DDPCommunicationHookType(TextEnum):
    """Compression of gradients in communication between ranks."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


class ComputeEnvironment(TextEnum):
    """The kind of machine on which a configuration runs."""

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


class SageMakerDistributedType(TextEnum):
    """Kinds of training on SageMaker."""

    NO = "NO"
    DATA_PARALLEL = "DATA_PARALLEL"
    MODEL_PARALLEL = "MODEL_PARALLEL"


class FP8BackendType(TextEnum):
    """Libraries of 8-bit floating point; ``AO`` is the one that trains here."""

    NO = "NO"
    TE = "TE"
    MSAMP = "MSAMP"
    AO = "AO"


class CustomDtype(Enum):
    """Dtypes of weights for which torch has no dtype."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"
