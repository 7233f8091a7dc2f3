"""This machine, its environment variables and its devices, with accelerate's names."""

from __future__ import annotations

import functools
import inspect
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from packaging.version import parse

from accel_nb.accelerator.process.logging import get_logger
from accel_nb.errors import MisuseError
from accel_nb.runtime.devices.registry import default_type
from accel_nb.runtime.process.environment import all_variables, set_variables

T = TypeVar("T")

_PREFIX = "ACCELERATE_"
_MIN_KERNEL_VERSION = "5.5.0"


@dataclass
class CPUInformation:
    """Rank and local rank of this process, with the sizes, as launchers of CPU processes set them."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def get_cpu_distributed_information() -> CPUInformation:
    """Return the ranks of this process, from the variables of torchrun or MPI."""
    names = {
        "rank": ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"),
        "world_size": ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"),
        "local_rank": ("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK"),
        "local_world_size": (
            "LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"
        ),
    }  # fmt: skip
    variables = all_variables()
    given = {
        field: next((variables[name] for name in known if name in variables), None) for field, known in names.items()
    }
    return CPUInformation(**{field: int(value) for field, value in given.items() if value is not None})


def check_os_kernel() -> None:
    """Warn if Linux is too old for processes that share memory to be stable."""
    system = platform.uname()
    version = re.match(r"\d+(\.\d+)+", system.release)
    if system.system == "Linux" and version and parse(version[0]) < parse(_MIN_KERNEL_VERSION):
        get_logger("accelerate.utils.other").warning(
            f"this kernel of Linux is {version[0]}, and processes that share memory may hang before "
            f"{_MIN_KERNEL_VERSION}; update it",
            main_process_only=True,
        )


def get_current_device_type() -> tuple[str, str]:
    """Return the type of this machine's devices, and the `DistributedType` for several devices."""
    name = default_type().name
    return name, {"cuda": "MULTI_GPU", "cpu": "MULTI_CPU", "xla": "XLA"}.get(name, f"MULTI_{name.upper()}")


def get_gpu_info() -> tuple[list[str], int]:
    """Return the names of the GPUs, and their number."""
    count = torch.cuda.device_count()
    return [torch.cuda.get_device_name(index) for index in range(count)], count


def get_driver_version() -> str:
    """Return the version of NVIDIA's driver; raises `MisuseError` without one."""
    from pathlib import Path

    path = Path("/proc/driver/nvidia/version")
    found = re.search(r"(\d+\.\d+(?:\.\d+)?)", path.read_text()) if path.is_file() else None
    if found is None:
        raise MisuseError("there is no NVIDIA driver on this machine")
    return found[1]


def check_cuda_p2p_ib_support() -> bool:
    """Return True: NCCL detects whether GPUs can access each other directly."""
    return True


def check_cuda_fp8_capability() -> bool:
    """Return whether the GPU supports 8-bit floating point."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Return those modules among the names that are imported in this process."""
    return [name for name in library_names if name in sys.modules]


def enable_fsdp_ram_efficient_loading() -> None:
    """Set the variables that make transformers load a sharded model's weights on the first process only."""
    set_variables({"FSDP_CPU_RAM_EFFICIENT_LOADING": "True"})


def disable_fsdp_ram_efficient_loading() -> None:
    """Set the variables so that transformers loads a sharded model's weights on each process."""
    set_variables({"FSDP_CPU_RAM_EFFICIENT_LOADING": "False"})


def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Bind this process to the CPU cores near its GPU, on Linux; do nothing without a GPU."""
    if not torch.cuda.is_available():
        return
    address = torch.cuda.get_device_properties(local_process_index)
    bus = f"{address.pci_domain_id:04x}:{address.pci_bus_id:02x}:{address.pci_device_id:02x}.0"
    path = f"/sys/bus/pci/devices/{bus}/local_cpulist"
    if not os.path.exists(path):
        return
    with open(path, encoding="ascii") as file:
        ranges = [part.split("-") for part in file.read().strip().split(",") if part]
    near = {cpu for ends in ranges for cpu in range(int(ends[0]), int(ends[-1]) + 1)} & os.sched_getaffinity(0)
    if near:
        os.sched_setaffinity(0, near)


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Bind this process to CPU cores as `set_numa_affinity` does."""
    set_numa_affinity(local_process_index, verbose)


def convert_dict_to_env_variables(current_env: Mapping[str, str]) -> list[str]:
    """Return variables as lines ``NAME=value``; those with characters that a shell interprets are left out."""
    lines: list[str] = []
    for name, value in current_env.items():
        if all(sign not in f"{name}{value}" for sign in ";\n<>| "):
            lines.append(f"{name}={value}\n")
        else:
            get_logger("accelerate.utils.environment").warning(
                f"the variable {name} has characters that a shell interprets, and is left out; remove them"
            )
    return lines


def purge_accelerate_environment(func_or_cls: T) -> T:
    """Decorate a function, or a class of tests, so that it restores variables ``ACCELERATE_...`` when it ends."""
    if isinstance(func_or_cls, type):
        return _purged_class(func_or_cls)
    return _purged_function(func_or_cls)  # pyright: ignore[reportArgumentType, reportReturnType]


def _purged_function(function: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def run_async(*args: Any, **kwargs: Any) -> Any:
            before = _accelerate_variables()
            try:
                return await function(*args, **kwargs)
            finally:
                _restore(before)

        return run_async

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        before = _accelerate_variables()
        try:
            return function(*args, **kwargs)
        finally:
            _restore(before)

    return run


def _purged_class(kind: Any) -> Any:
    """Wrap the tests of a class, and of its subclasses."""
    own: Any = kind.__dict__.get("__init_subclass__")

    def __init_subclass__(cls: Any, **kwargs: Any) -> None:
        if own is not None:
            own.__get__(None, cls)(**kwargs)
        else:
            super(kind, cls).__init_subclass__(**kwargs)
        _wrap_tests(cls)

    _wrap_tests(kind)
    kind.__init_subclass__ = classmethod(__init_subclass__)
    return kind


def _wrap_tests(kind: Any) -> None:
    for name, value in list(vars(kind).items()):
        if name.startswith("test") and inspect.isfunction(value):
            setattr(kind, name, _purged_function(value))


def _accelerate_variables() -> dict[str, str]:
    return {name: value for name, value in all_variables().items() if name.startswith(_PREFIX)}


def _restore(before: Mapping[str, str]) -> None:
    now = _accelerate_variables()
    set_variables({**dict.fromkeys(now.keys() - before.keys()), **before})


def get_free_port() -> int:
    """Return a free port of this machine."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
