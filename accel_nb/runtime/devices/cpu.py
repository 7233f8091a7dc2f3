"""The CPU as a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import psutil

from accel_nb.runtime.devices.base import DeviceMemory, DeviceType

if TYPE_CHECKING:
    import torch


class Cpu(DeviceType):
    """The CPU, with the memory of the process and torch's global generator."""

    name = "cpu"
    is_host: ClassVar[bool] = True
    in_collectives: ClassVar[bool] = True

    def count(self) -> int:
        """Return 1."""
        return 1

    def memory(self, device: torch.device | str = "cpu") -> DeviceMemory:
        """Measure the memory of the process and of the machine."""
        return host_memory()

    def has_real_bf16(self, device: torch.device | str) -> bool:
        """Return whether the processor has the instructions of torch's fast kernels for bfloat16.

        Without them, a matrix product in bfloat16 takes about ten times as long as in float32.
        """
        import torch

        return torch.backends.cpu.get_cpu_capability().startswith(("AVX512", "SVE"))

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        """Return the state of torch's global generator."""
        import torch

        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        """Set torch's global generator."""
        import torch

        torch.set_rng_state(state)


def host_memory() -> DeviceMemory:
    """Measure the memory of this process and of its machine."""
    resident = psutil.Process().memory_info().rss
    machine = psutil.virtual_memory()
    return DeviceMemory(resident, resident, machine.available, machine.total, is_of_process=True)
