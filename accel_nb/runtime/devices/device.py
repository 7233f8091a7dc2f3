"""The precision that a device computes in."""

from __future__ import annotations

import torch

from accel_nb.runtime.devices.registry import device_type


def has_real_bf16(device: torch.device | str) -> bool:
    """Whether the device computes bfloat16 in hardware, and so not much slower than float32."""
    return device_type(device).has_real_bf16(device)


def choose_precision(name: str, device: torch.device | str) -> str:
    """Return the precision to run with: ``auto`` becomes the best that the device really has."""
    if name != "auto":
        return name
    if device_type(device).is_host:
        return "no"
    return "bf16" if has_real_bf16(device) else "fp16"
