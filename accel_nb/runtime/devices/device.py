"""What a torch device can do and how full it is."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from typing import Any

import psutil
import torch

_FIRST_CAPABILITY_WITH_BF16 = (8, 0)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of one device in bytes; on the CPU that of this process and its machine.

    ``allocated`` is in live tensors, ``reserved`` is held by the process in all, ``free`` and ``total`` are the
    device's own. On the CPU the process's resident memory stands for both of the first two.
    """

    allocated: int
    reserved: int
    free: int
    total: int


def has_real_bf16(device: torch.device | str) -> bool:
    """Whether the device computes bfloat16 in hardware, or at least no slower than torch's CPU kernels do.

    torch's own answer for CUDA counts emulation, which is slower than float32; the compute capability does not lie.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY_WITH_BF16
    return device.type in ("cpu", "xpu", "xla")


def choose_precision(name: str, device: torch.device | str) -> str:
    """Return the precision to run with: ``auto`` becomes the best that the device really has."""
    if name != "auto":
        return name
    if torch.device(device).type == "cpu":
        return "no"
    return "bf16" if has_real_bf16(device) else "fp16"


def use(device: torch.device | str) -> torch.device:
    """Make the device this process's current one, so that ``"cuda"`` without a number means it."""
    device = torch.device(device)
    if device.type == "cuda":
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        torch.cuda.set_device(device)
    return device


def memory(device: torch.device | str) -> DeviceMemory:
    """Measure the device's memory; does not wait for the device."""
    device = torch.device(device)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device), free, total)
    if device.type == "xla":
        from accel_nb.runtime.devices import xla

        if not xla.is_processor():
            return DeviceMemory(0, 0, 0, 0)  # chips that one process drives together do not tell
    resident = psutil.Process().memory_info().rss
    machine = psutil.virtual_memory()
    return DeviceMemory(resident, resident, machine.available, machine.total)


def allocator_snapshot(device: torch.device | str) -> list[dict[str, Any]] | None:
    """Return the segments and blocks of torch's own allocator, of all devices; None where it has none.

    Without the history of allocations, which may be long.
    """
    if torch.device(device).type != "cuda":
        return None
    if "include_traces" in inspect.signature(torch.cuda.memory_snapshot).parameters:
        return torch.cuda.memory_snapshot(include_traces=False)
    return torch.cuda.memory_snapshot()


def get_rng_state(device: torch.device) -> torch.Tensor:
    """Return the state of the device's own generator, on the CPU."""
    if device.type == "xla":
        from accel_nb.runtime.devices import xla

        return xla.get_rng_state(device)
    return torch.get_device_module(device).get_rng_state(device).cpu()


def set_rng_state(state: torch.Tensor, device: torch.device) -> None:
    """Set the device's own generator to what `get_rng_state` returned."""
    if device.type == "xla":
        from accel_nb.runtime.devices import xla

        xla.set_rng_state(state, device)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def seed_beside_torch(seed: int) -> None:
    """Seed the devices in use that ``torch.manual_seed`` does not reach."""
    xla = sys.modules.get("accel_nb.runtime.devices.xla")
    if xla is not None:
        xla.seed(seed)
