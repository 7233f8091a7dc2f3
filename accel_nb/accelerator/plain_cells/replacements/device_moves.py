"""Replacements of functions of torch that take a device: ``cuda`` is the device of this worker."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from accel_nb.runtime.devices.registry import device_type

FACTORIES = (
    "arange", "as_tensor", "asarray", "bartlett_window", "blackman_window", "empty", "empty_like", "empty_permuted",
    "empty_strided", "eye", "full", "full_like", "hamming_window", "hann_window", "kaiser_window", "linspace",
    "logspace", "normal", "ones", "ones_like", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like",
    "randperm", "scalar_tensor", "sparse_compressed_tensor", "sparse_coo_tensor", "sparse_csc_tensor",
    "sparse_csr_tensor", "tensor", "tril_indices", "triu_indices", "zeros", "zeros_like",
)  # fmt: skip
"""The functions of torch that make tensors on a device."""

METHODS = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")
"""The methods of tensors that make tensors on a device."""


def make_device_mapping(device: torch.device) -> Callable[[Any], Any]:
    """Return a function that replaces a CUDA device, given as text, device or index, by the device of this worker."""

    def map_device(wanted: Any) -> Any:
        kind = type(wanted)
        if kind is str:
            return device if device_type(wanted).trains_by_default else wanted
        if kind is torch.device:
            return device if device_type(wanted).trains_by_default else wanted
        return device if kind is int else wanted

    return map_device


def replace_to(map_device: Callable[[Any], Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``to`` method of tensors or modules that uses this worker's device in place of a CUDA device."""

    @functools.wraps(original)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            return original(self, map_device(args[0]), *args[1:], **kwargs)
        if kwargs.get("device") is not None:
            kwargs["device"] = map_device(kwargs["device"])
        return original(self, **kwargs)

    return to


def replace_cuda(own: torch.device, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``cuda`` method of tensors or modules that moves them to this worker's device."""

    @functools.wraps(original)
    def cuda(self: Any, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        return self.to(own) if isinstance(self, nn.Module) else self.to(own, non_blocking=non_blocking, **kwargs)

    return cuda


def collect_factories() -> None:
    """Make PyTorch collect the functions that a device context applies to, before they are replaced.

    It does so once, when it first needs them: functions that replace them later are not in its list.
    """
    with torch.device("cpu"):
        torch.empty(0, device="cpu")


def replace_factory(map_device: Callable[[Any], Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function or method that uses this worker's device in place of a CUDA ``device``."""

    @functools.wraps(original)
    def factory(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = map_device(kwargs["device"])
        return original(*args, **kwargs)

    return factory
