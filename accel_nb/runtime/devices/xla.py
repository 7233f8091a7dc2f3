"""What is asked of torch_xla about a device: what it is, and its random numbers. Imported where there is one."""

from __future__ import annotations

import torch
import torch_xla.core.xla_model as xm  # pyright: ignore[reportMissingImports]
import torch_xla.runtime as xr  # pyright: ignore[reportMissingImports]


def is_processor() -> bool:
    """Whether the device is this machine's processor."""
    return xr.device_type() == "CPU"


def get_rng_state(device: torch.device) -> torch.Tensor:
    """Return the state of the device's generator: the bits of an unsigned number of 64, as int64."""
    state = xm.get_rng_state(str(device))
    return torch.tensor([state - 2**64 if state >= 2**63 else state], dtype=torch.int64)


def set_rng_state(state: torch.Tensor, device: torch.device) -> None:
    """Set the device's generator to what `get_rng_state` returned."""
    xm.set_rng_state(int(state[0]) % 2**64, str(device))


def seed(seed: int) -> None:
    """Seed the generator of the device."""
    xm.set_rng_state(seed % 2**63)
