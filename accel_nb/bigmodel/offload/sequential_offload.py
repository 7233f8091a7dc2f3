"""Models that use one device in turn, as the models of a diffusion pipeline do.

A model moves to the device for its forward and stays there until the next model needs the memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from accel_nb.bigmodel.planning.sizes import Device, to_torch_device
from accel_nb.runtime.devices.registry import default_type, device_type
from accel_nb.runtime.tensors.nested import to_device


class UserCpuOffloadHook:
    """Moves a model to host memory (`offload`), and removes its forward hook (`remove`)."""

    def __init__(self, model: nn.Module, device: torch.device, previous: UserCpuOffloadHook | None) -> None:
        self._model = model
        self._device = device
        self._previous = previous
        self._moved: list[tuple[Tensor, torch.device]] = []
        self._handle = model.register_forward_pre_hook(self._move_to_device, with_kwargs=True)

    def offload(self) -> None:
        """Move the model back; its device memory is freed."""
        for tensor, before in self._moved:
            tensor.data = tensor.data.to(before)
        self._moved.clear()

    def remove(self) -> None:
        """Remove the hook; the model is not moved."""
        self._handle.remove()

    def _move_to_device(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._previous is not None:
            self._previous.offload()
        if not self._moved:
            try:
                for tensor in [*module.parameters(), *module.buffers()]:
                    if tensor.device != self._device:
                        before = tensor.device
                        tensor.data = tensor.data.to(self._device)
                        self._moved.append((tensor, before))
            except BaseException:  # as from a device without memory
                self.offload()
                raise
        return to_device((args, kwargs), self._device)


def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: Device | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keep a model in host memory until its forward, then on ``execution_device`` until the hook's ``offload()``.

    Returns the model and that hook. ``prev_module_hook`` is offloaded first. ``execution_device=None`` is the first
    accelerator, or the CPU without one; then nothing moves.
    """
    default: Device = "cpu" if default_type().is_host else 0
    device = to_torch_device(default if execution_device is None else execution_device)
    if not device_type(device).is_host:
        model.to("cpu")
    return model, UserCpuOffloadHook(model, device, prev_module_hook)
