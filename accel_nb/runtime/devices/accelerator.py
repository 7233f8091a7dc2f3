"""Devices that are accessed by torch's generic interfaces: xpu, mps, and types that are not registered.

No test has run on such a device. Only functions that torch has for every type are used, and copies are synchronous.
"""

from __future__ import annotations

from typing import Any

import torch

from accel_nb.runtime.devices.base import DeviceMemory, DeviceType
from accel_nb.runtime.devices.cpu import host_memory

_WITH_BF16 = frozenset({"xpu"})


class GenericDevice(DeviceType):
    """A type of device that is accessed by its name, through `torch.get_device_module`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def count(self) -> int:
        """Count the devices; 0 if this torch was built without the type."""
        try:
            module = self._module()
            return int(module.device_count()) if module.is_available() else 0
        except (RuntimeError, AttributeError):
            return 0

    def make_current(self, device: torch.device) -> torch.device:
        """Return the device unchanged: types with one device have no current device."""
        return device

    def memory(self, device: torch.device | str) -> DeviceMemory:
        """Measure a device's memory, or the memory of the process if torch cannot measure the device's."""
        module = self._module()
        if not hasattr(module, "mem_get_info"):
            return host_memory()
        free, total = module.mem_get_info(device)
        return DeviceMemory(module.memory_allocated(device), module.memory_reserved(device), free, total)

    def peak_bytes(self, device: torch.device | str) -> int | None:
        """Return the peak bytes of tensors; None if torch does not count them."""
        count = getattr(self._module(), "max_memory_allocated", None)
        return None if count is None else count(device)

    def has_real_bf16(self, device: torch.device | str) -> bool:
        """Return whether the type is known to support bfloat16 in hardware."""
        return self.name in _WITH_BF16

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        """Return the state of the device's generator, on the CPU."""
        return self._module().get_rng_state(device).cpu()

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        """Set the device's generator."""
        self._module().set_rng_state(state, device)

    def empty_cache(self) -> None:
        """Return unused cached memory to the device."""
        self._module().empty_cache()

    def synchronize(self, device: torch.device | str) -> None:
        """Wait for the device."""
        if hasattr(module := self._module(), "synchronize"):
            module.synchronize()

    def _module(self) -> Any:
        return torch.get_device_module(self.name)
