"""Devices of PyTorch/XLA. torch_xla is imported in the methods: most environments do not have it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from accel_nb.runtime.devices.base import DeviceMemory, DeviceType
from accel_nb.runtime.devices.cpu import host_memory
from accel_nb.runtime.process.hardware import count_tpu_chips, why_no_xla

if TYPE_CHECKING:
    import torch


class Xla(DeviceType):
    """All chips of a TPU as one device of one process, or the CPU if there is no TPU.

    `strategies.xla` opens the device and calls `note_opened`.
    """

    name = "xla"
    has_addresses: ClassVar[bool] = False

    def __init__(self) -> None:
        self._is_open = False

    def count(self) -> int:
        """Return 1 if there are chips that torch_xla can use: one device represents all of them."""
        return int(count_tpu_chips() > 0 and why_no_xla() is None)

    def why_unusable(self) -> list[str]:
        """Return the reason if torch_xla does not run with the installed torch."""
        why = why_no_xla()
        return [] if why is None else [why]

    def memory(self, device: torch.device | str) -> DeviceMemory:
        """Measure the process if the device is the CPU; return zeros for TPU chips, whose memory is not reported."""
        import torch_xla.runtime as xr  # pyright: ignore[reportMissingImports]

        return host_memory() if xr.device_type() == "CPU" else DeviceMemory(0, 0, 0, 0)

    def has_real_bf16(self, device: torch.device | str) -> bool:
        """Return True: TPUs compute in bfloat16."""
        return True

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        """Return the bits of the generator's unsigned 64-bit state, as int64."""
        import torch
        import torch_xla.core.xla_model as xm  # pyright: ignore[reportMissingImports]

        state = xm.get_rng_state(str(device))
        return torch.tensor([state - 2**64 if state >= 2**63 else state], dtype=torch.int64, device="cpu")

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        """Set the generator to a state that `get_rng_state` has returned."""
        import torch_xla.core.xla_model as xm  # pyright: ignore[reportMissingImports]

        xm.set_rng_state(int(state[0]) % 2**64, str(device))

    def note_opened(self) -> None:
        """Record that the device is open, so that it is seeded with torch; seeding it earlier would open it."""
        self._is_open = True

    def seed_beside_torch(self, seed: int) -> None:
        """Seed the generator if the device is open."""
        if self._is_open:
            import torch_xla.core.xla_model as xm  # pyright: ignore[reportMissingImports]

            xm.set_rng_state(seed % 2**63)
