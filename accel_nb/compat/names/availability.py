"""Predicates ``is_..._available`` about this machine and its packages, created by name on access.

A predicate about a package finds it without importing it; for a name with dots, the packages around it are imported.
One about hardware that accel_nb does not support is False on every machine.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from packaging.version import Version

from accel_nb.runtime.devices.cuda import Cuda
from accel_nb.runtime.devices.registry import default_type, device_type

_PACKAGES: Mapping[str, str] = MappingProxyType(
    {
        "lomo": "lomo_optim",
        "megatron_lm": "megatron.core",
        "pippy": "torch.distributed.pipelining",
        "ipex": "intel_extension_for_pytorch",
        "4bit_bnb": "bitsandbytes",
        "8bit_bnb": "bitsandbytes",
        "torchdata_stateful_dataloader": "torchdata.stateful_dataloader",
        "torch_distributed": "torch.distributed",
    }
)
"""Packages whose name differs from the predicate's."""
_UNSUPPORTED_HARDWARE = frozenset(
    {
        "amdsmi",
        "hpu",
        "mlu",
        "musa",
        "neuron",
        "npu",
        "sdaa",
        "transformer_engine_mxfp8",
        "bitsandbytes_multi_backend",
        "sagemaker",
        "xccl",
        "xpu",
    }
)


_AVAILABILITY_CHECKS: Mapping[str, Callable[[], bool]] = MappingProxyType(
    {
        "bf16": lambda: (kind := default_type()).is_host or kind.has_real_bf16(kind.name),
        "cuda": lambda: device_type("cuda").is_available(),
        "fp16": lambda: True,
        "weights_only": lambda: True,
        "fp8": lambda: importlib.util.find_spec("torchao") is not None,
        "mps": torch.backends.mps.is_available,
        "rocm": lambda: Cuda().is_rocm and Cuda().is_available(),
    }
)


def _required(package: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not _is_available(package):
            raise ImportError(f"{function.__qualname__} needs the package {package}; pip install {package}")
        return function(*args, **kwargs)

    return checked


def deepspeed_required(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function that needs DeepSpeed."""
    return _required("deepspeed", function)


def torchao_required(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function that needs torchao."""
    return _required("torchao", function)


def is_package_available(pkg_name: str, metadata_name: str | None = None) -> bool:
    """Return whether a package can be imported and has a distribution of this name."""
    try:
        importlib.metadata.distribution(metadata_name or pkg_name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return importlib.util.find_spec(pkg_name) is not None


def is_bnb_available(min_version: str | None = None) -> bool:
    """Return whether bitsandbytes is installed, in this version or a newer one."""
    return _has_version("bitsandbytes", min_version)


def is_numpy_available(min_version: str | None = "1.25.0") -> bool:
    """Return whether NumPy is installed, in this version or a newer one."""
    return _has_version("numpy", min_version)


def is_habana_gaudi1() -> bool:
    """Return False: Gaudi is not supported."""
    return False


def _has_version(package: str, min_version: str | None) -> bool:
    if not is_package_available(package):
        return False
    return min_version is None or Version(importlib.metadata.version(package)) >= Version(min_version)


def __getattr__(name: str) -> Callable[..., bool]:
    requirement = name.removeprefix("is_").removesuffix("_available")
    if name != f"is_{requirement}_available":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return functools.partial(_is_available, requirement)


def _is_available(requirement: str, *args: object, **kwargs: object) -> bool:
    # Some predicates of accelerate have further arguments (such as a device to skip), which change nothing here.
    if requirement in _UNSUPPORTED_HARDWARE:
        return False
    if requirement in _AVAILABILITY_CHECKS:
        return _AVAILABILITY_CHECKS[requirement]()
    try:
        spec = importlib.util.find_spec(_PACKAGES.get(requirement, requirement))
    except (ImportError, ValueError):  # its parent package is missing, or it is in sys.modules without a spec
        return False
    # A folder of the notebook with the name of a package is found without an origin.
    return spec is not None and spec.origin is not None
