"""The choice of the precision for a device."""

from __future__ import annotations

import torch

from accel_nb.runtime.devices.registry import device_type


def choose_precision(name: str, device: torch.device | str) -> str:
    """Return the precision to run with: ``auto`` is replaced by the best that the device has in hardware."""
    if name != "auto":
        return name
    kind = device_type(device)
    if kind.is_host:
        return "no"
    return "bf16" if kind.has_real_bf16(device) else "fp16"
