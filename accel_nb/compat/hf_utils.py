"""Small functions, enumerations and constants that scripts import from ``accelerate.utils``."""

from __future__ import annotations

import functools
import importlib.metadata
import operator
import os
import socket
from collections.abc import Callable, Iterable, MutableMapping
from enum import Enum, EnumMeta
from functools import reduce
from typing import Any

import torch
from packaging.version import Version, parse
from torch import Tensor

from accel_nb.accelerator.process.logging import get_logger
from accel_nb.accelerator.process.memory_release import free_cached_memory, is_out_of_memory
from accel_nb.accelerator.process.seeding import synchronize_rng_states
from accel_nb.checkpoint.export import drop_tied_duplicates, save_value
from accel_nb.runtime.distributed.current_world import current_world
from accel_nb.runtime.process.environment import get_variable

_COMPARISONS = {
    "<": operator.lt, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">=": operator.ge, ">": operator.gt
}  # fmt: skip
_TRUE = frozenset({"y", "yes", "t", "true", "on", "1"})
_FALSE = frozenset({"n", "no", "f", "false", "off", "0"})


class _ListMeta(EnumMeta):
    """Metaclass of enumerations: `list` returns the values, and ``in`` accepts values."""

    def list(cls) -> list[str]:
        """Return the values."""
        return [member.value for member in cls]  # type: ignore[var-annotated]

    def __contains__(cls, value: object) -> bool:
        return value in [member.value for member in cls]  # type: ignore[var-annotated]


class TextEnum(str, Enum, metaclass=_ListMeta):
    """Base of enumerations whose members are strings and are formatted as such."""

    def __str__(self) -> str:
        return self.value


class PrecisionType(TextEnum):
    """Number formats; each member equals its text."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class DynamoBackend(TextEnum):
    """Backends of torch.compile by name; torch raises an error at the first compilation if one is not installed."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    CUDAGRAPHS = "CUDAGRAPHS"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    TVM = "TVM"
    HPU_BACKEND = "HPU_BACKEND"
    NEURON = "NEURON"


class RNGType(TextEnum):
    """Generators whose states can be synchronized."""

    TORCH = "torch"
    CUDA = "cuda"
    MLU = "mlu"
    SDAA = "sdaa"
    MUSA = "musa"
    NPU = "npu"
    XLA = "xla"
    XPU = "xpu"
    HPU = "hpu"
    NEURON = "neuron"
    GENERATOR = "generator"


class LoggerType(TextEnum):
    """Trackers by name, as accepted by ``log_with``."""

    ALL = "all"
    AIM = "aim"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    COMETML = "comet_ml"
    MLFLOW = "mlflow"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"


def is_initialized() -> bool:
    """Return True: a state can always be created."""
    return True


def on_main_process(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a tracker's method to run on rank 0 only, unless the tracker runs on every rank."""

    @functools.wraps(function)
    def run_on_main(tracker: Any, *args: Any, **kwargs: Any) -> Any:
        is_here = current_world().is_main or not getattr(tracker, "main_process_only", True)
        return function(tracker, *args, **kwargs) if is_here else None

    return run_on_main


def save(
    obj: Any, f: str | os.PathLike[str], save_on_each_node: bool = False, safe_serialization: bool = False
) -> None:
    """Write plain values and tensors on rank 0, or on each machine's first rank; see `Accelerator.save`.

    Safetensors stores a tensor of several names under the first one, and a warning lists the others.
    """
    world = current_world()
    if world.is_local_main if save_on_each_node else world.is_main:
        if safe_serialization and isinstance(obj, dict) and (dropped := obj.keys() - drop_tied_duplicates(obj).keys()):
            get_logger("accelerate.utils.other").warning(
                f"left out {sorted(dropped)}: a tensor of several names is stored once, under its first name; tie the "
                "weights after loading",
                main_process_only=False,
            )
        save_value(obj, f, as_safetensors=safe_serialization)


def is_torch_tensor(tensor: object) -> bool:
    """Return whether a value is a tensor."""
    return isinstance(tensor, Tensor)


def is_namedtuple(data: object) -> bool:
    """Return whether a value is a tuple with named fields."""
    return isinstance(data, tuple) and hasattr(data, "_asdict") and hasattr(data, "_fields")


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Return the items as a container of the type of ``obj``."""
    return type(obj)(*generator) if is_namedtuple(obj) else type(obj)(generator)


def clear_device_cache(garbage_collection: bool = True) -> None:
    """Collect garbage (in accelerate off by default), and free cached memory of the device."""
    free_cached_memory()


def synchronize_all_rng_states(rng_types: Iterable[str | RNGType], generator: torch.Generator | None = None) -> None:
    """Set the named generators to their states on rank 0, on every rank; every rank must call."""
    synchronize_rng_states([str(getattr(kind, "value", kind)) for kind in rng_types], generator)


def should_reduce_batch_size(exception: Exception) -> bool:
    """Return whether an error reports that the device or the machine is out of memory."""
    return is_out_of_memory(exception)


def synchronize_rng_state(rng_type: RNGType | str | None = None, generator: torch.Generator | None = None) -> None:
    """Set one generator to its state on rank 0, on every rank; every rank must call."""
    synchronize_rng_states([str(rng_type or "torch")], generator)


def str_to_bool(value: str, to_bool: bool = False) -> bool | int:
    """Return 1 or 0, or with ``to_bool`` True or False, for usual spellings of yes and no; else raise ValueError."""
    text = value.lower()
    if text not in _TRUE | _FALSE:
        raise ValueError(f"{value!r} is neither yes nor no; pass one of {', '.join(sorted(_TRUE | _FALSE))}")
    return text in _TRUE if to_bool else int(text in _TRUE)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Return an environment variable as a bool."""
    return bool(str_to_bool(get_variable(key, str(default))))


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Return an environment variable as text."""
    return get_variable(key, str(default))


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """Return the first of some environment variables whose value is a nonnegative integer, else the default."""
    values = (int(get_variable(key, "-1")) for key in env_keys)
    return next((value for value in values if value >= 0), default)


def compare_versions(library_or_version: str | Version, operation: str, requirement_version: str) -> bool:
    """Compare the version of an installed package, or a version, with another one."""
    if operation not in _COMPARISONS:
        raise ValueError(f"{operation!r} is not a comparison; pass one of {', '.join(_COMPARISONS)}")
    found = library_or_version
    if isinstance(found, str):
        found = parse(importlib.metadata.version(found))
    return _COMPARISONS[operation](found, parse(requirement_version))


def is_torch_version(operation: str, version: str) -> bool:
    """Compare PyTorch's version, without the local part after a plus, with another one."""
    return compare_versions(parse(parse(torch.__version__).base_version), operation, version)


def is_port_in_use(port: int | None = None) -> bool:
    """Return whether a port of this machine accepts connections."""
    if port is None:
        port = 29500
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", port)) == 0


def convert_bytes(size: float) -> str:
    """Return a size as text, such as ``1.5 MB``."""
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} PB"


def merge_dicts(source: MutableMapping[Any, Any], destination: MutableMapping[Any, Any]) -> MutableMapping[Any, Any]:
    """Merge one dict into another, in place and recursively, and return the other."""
    for key, value in source.items():
        if isinstance(value, MutableMapping):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Return an attribute by its dotted name."""
    return reduce(getattr, attr.split("."), obj)
