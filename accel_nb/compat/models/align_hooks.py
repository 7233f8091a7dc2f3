"""Hooks that move weights and inputs to the device of each module, with accelerate's names.

`accel_nb.dispatch_model` and similar functions do this with prefetching and without hooks; these hooks are for
libraries that attach them directly.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from accel_nb.accelerator.process.operations import find_device, send_to_device
from accel_nb.compat.models.model_hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from accel_nb.compat.models.module_tensors import named_module_tensors, set_module_tensor_to_device
from accel_nb.compat.models.offloaded_files import PrefixedDataset

Device = int | str | torch.device
_Shared = MutableMapping[int, MutableMapping[Any, Tensor]]


class AlignDevicesHook(ModelHook):
    """Moves weights, inputs and outputs of one module to its device.

    Args:
        execution_device: The device on which the module computes.
        offload: Load the weights for each forward only, from ``weights_map``.
        io_same_device: Return outputs on the device of the inputs.
        weights_map: The weights by name; by default copies of the module's weights on the CPU.
        offload_buffers: Offload buffers too.
        place_submodules: Include the weights of all submodules.
        skip_keys: Names of arguments that are not moved.
        tied_params_map: For the address of a shared tensor its copy on each device.
    """

    def __init__(
        self,
        execution_device: Device | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, Tensor] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: str | Collection[str] | None = None,
        tied_params_map: _Shared | None = None,
    ) -> None:
        self.execution_device, self.offload, self.io_same_device = execution_device, offload, io_same_device
        self.weights_map, self.offload_buffers, self.place_submodules = weights_map, offload_buffers, place_submodules
        self.skip_keys, self.tied_params_map = skip_keys, tied_params_map
        self.input_device: torch.device | None = None
        self.original_devices: dict[str, torch.device] = {}
        self._loaded_copies: list[tuple[int, torch.device]] = []

    def __repr__(self) -> str:
        return (
            f"AlignDevicesHook(execution_device={self.execution_device}, offload={self.offload}, "
            f"io_same_device={self.io_same_device}, offload_buffers={self.offload_buffers}, "
            f"place_submodules={self.place_submodules}, skip_keys={self.skip_keys!r})"
        )

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Move the module's tensors to its device, or offload them."""
        if not self.offload:
            if self.execution_device is not None:
                for name, _ in named_module_tensors(module, recurse=self.place_submodules):
                    set_module_tensor_to_device(
                        module, name, self.execution_device, tied_params_map=self.tied_params_map
                    )
            return module
        tensors = dict(named_module_tensors(module, recurse=self.place_submodules))
        offloaded = self._names(module)
        self.original_devices = {name: tensors[name].device for name in tensors}
        if self.weights_map is None:
            self.weights_map = {name: tensors[name].detach().to("cpu") for name in offloaded}
        for name in tensors:
            if name in offloaded:
                set_module_tensor_to_device(module, name, "meta")
            elif self.execution_device is not None:
                set_module_tensor_to_device(module, name, self.execution_device)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Load the weights, and move the inputs."""
        if self.io_same_device:
            self.input_device = find_device([args, kwargs])
        if self.offload:
            assert self.weights_map is not None
            for name in self._names(module):
                value = self.weights_map[name]
                device = self.execution_device if self.execution_device is not None else value.device
                if self._is_shared(value):
                    self._loaded_copies.append((value.data_ptr(), torch.device(device)))
                set_module_tensor_to_device(module, name, device, value=value, tied_params_map=self.tied_params_map)
        if self.execution_device is None:
            return args, kwargs
        moved = send_to_device(args, self.execution_device)
        return moved, send_to_device(kwargs, self.execution_device, skip_keys=self.skip_keys)

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Unload the weights, and move the output to the device of the inputs."""
        if self.offload:
            for name in self._names(module):
                set_module_tensor_to_device(module, name, "meta")
            for address, device in self._loaded_copies:
                assert self.tied_params_map is not None
                self.tied_params_map[address].pop(device, None)
            self._loaded_copies.clear()
        if self.io_same_device and self.input_device is not None:
            output = send_to_device(output, self.input_device, skip_keys=self.skip_keys)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Move the weights back to their original devices."""
        for name, device in self.original_devices.items():
            if device.type != "meta":
                value = self.weights_map.get(name) if self.weights_map is not None else None
                set_module_tensor_to_device(module, name, device, value=value)
        return module

    def _names(self, module: nn.Module) -> list[str]:
        found = named_module_tensors(
            module, include_buffers=self.offload_buffers, recurse=self.place_submodules, remove_non_persistent=True
        )
        return [name for name, _ in found]

    def _is_shared(self, value: Tensor) -> bool:
        """Return whether other modules share the tensor; all of them then use its copies on devices."""
        return self.tied_params_map is not None and value.data_ptr() in self.tied_params_map


class CpuOffload(ModelHook):
    """Keeps a model on the CPU until its forward, then on a device until the forward of the next model."""

    def __init__(
        self, execution_device: Device | None = None, prev_module_hook: UserCpuOffloadHook | None = None
    ) -> None:
        self.prev_module_hook = prev_module_hook
        accelerator = torch.accelerator.current_accelerator()
        self.execution_device = execution_device if execution_device is not None else accelerator or "cpu"

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Move the model to the CPU."""
        return module.to("cpu")

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Move the model before this one to the CPU, and this one to its device."""
        if self.prev_module_hook is not None:
            self.prev_module_hook.offload()
        module.to(self.execution_device)
        return send_to_device(args, self.execution_device), send_to_device(kwargs, self.execution_device)


class UserCpuOffloadHook:
    """A model with its hook: `offload` moves it to the CPU, `remove` removes the hook."""

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model, self.hook = model, hook

    def offload(self) -> None:
        """Move the model to the CPU."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Remove the hook."""
        remove_hook_from_module(self.model)


class LayerwiseCastingHook(ModelHook):
    """Stores the weights of a module in one dtype and converts them to another for its forward."""

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool = False) -> None:
        self.storage_dtype, self.compute_dtype, self.non_blocking = storage_dtype, compute_dtype, non_blocking

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Convert the weights to the dtype of storage."""
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Convert the weights to the dtype of the computation."""
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Convert the weights back."""
        self.init_hook(module)
        return output


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Device,
    skip_keys: str | Collection[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    tied_params_map: _Shared | None = None,
) -> None:
    """Attach a hook to every module that has none, which moves it to a device and computes there."""
    if not hasattr(module, "_hf_hook") and len(module.state_dict()) > 0:
        add_hook_to_module(
            module, AlignDevicesHook(execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map)
        )
    if type(module).__name__ in (preload_module_classes or ()):
        return
    for child in module.children():
        attach_execution_device_hook(child, execution_device, skip_keys, preload_module_classes, tied_params_map)


def attach_align_device_hook(
    module: nn.Module,
    execution_device: Device | None = None,
    offload: bool = False,
    weights_map: Mapping[str, Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | Collection[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    tied_params_map: _Shared | None = None,
) -> None:
    """Attach an `AlignDevicesHook` to each module that directly has tensors, or whose class is preloaded as a whole."""
    is_whole = offload and type(module).__name__ in (preload_module_classes or ())
    if is_whole or next(named_module_tensors(module), None) is not None:
        own = None if weights_map is None else PrefixedDataset(weights_map, f"{module_name}." if module_name else "")
        hook = AlignDevicesHook(
            execution_device,
            offload,
            weights_map=own,
            offload_buffers=offload_buffers,
            place_submodules=is_whole,
            skip_keys=skip_keys,
            tied_params_map=tied_params_map,
        )
        add_hook_to_module(module, hook, append=True)
    if is_whole:
        return
    for name, child in module.named_children():
        attach_align_device_hook(
            child,
            execution_device,
            offload,
            weights_map,
            offload_buffers,
            f"{module_name}.{name}" if module_name else name,
            skip_keys,
            preload_module_classes,
            tied_params_map,
        )


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: Device | Mapping[str, Device | None] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Mapping[str, Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | Collection[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    tied_params_map: _Shared | None = None,
) -> None:
    """Attach hooks to the modules that ``execution_device`` and ``offload`` name.

    The hook of the whole model returns outputs on the device of the inputs.
    """
    devices: Mapping[str, Device | None] = (
        execution_device if isinstance(execution_device, Mapping) else {module_name: execution_device}
    )
    offloaded = offload if isinstance(offload, Mapping) else dict.fromkeys(devices, offload)
    if module_name in devices and not offloaded.get(module_name, False):
        device = devices[module_name]
        hook = AlignDevicesHook(
            device,
            io_same_device=module_name == "",
            place_submodules=True,
            skip_keys=skip_keys,
            tied_params_map=tied_params_map,
        )
        add_hook_to_module(module, hook)
        if device is not None:
            attach_execution_device_hook(module, device, skip_keys, tied_params_map=tied_params_map)
    elif module_name in devices:
        device = devices[module_name]
        attach_align_device_hook(
            module,
            device,
            True,
            weights_map,
            offload_buffers,
            module_name,
            skip_keys,
            preload_module_classes,
            tied_params_map,
        )
        if not hasattr(module, "_hf_hook"):
            add_hook_to_module(module, AlignDevicesHook(device, io_same_device=module_name == "", skip_keys=skip_keys))
        if device is not None:
            attach_execution_device_hook(module, device, skip_keys, preload_module_classes, tied_params_map)
    elif module_name == "":
        add_hook_to_module(module, AlignDevicesHook(io_same_device=True, skip_keys=skip_keys), append=True)
    for name, child in module.named_children():
        attach_align_device_hook_on_blocks(
            child,
            devices,
            offloaded,
            weights_map,
            offload_buffers,
            f"{module_name}.{name}" if module_name else name,
            skip_keys,
            preload_module_classes,
            tied_params_map,
        )
