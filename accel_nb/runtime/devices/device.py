"""The choice of the precision for a device."""

from __future__ import annotations

import torch

from accel_nb.runtime.devices.registry import device_type


def has_real_bf16(device: torch.device | str) -> bool:
    """Return whether the device computes bfloat16 in hardware, and so not much slower than float32."""
    return device_type(device).has_real_bf16(device)


def choose_precision(name: str, device: torch.device | str) -> str:
    """Return the precision to run with: ``auto`` is replaced by the best that the device has in hardware."""
    if name != "auto":
        return name
    if device_type(device).is_host:
        return "no"
    return "bf16" if has_real_bf16(device) else "fp16"
