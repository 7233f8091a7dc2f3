"""Construction of modules with weights on the meta device, or directly on another device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from accel_nb.bigmodel.host_memory import empty_tensors
from accel_nb.runtime.devices.registry import device_type


@contextmanager
def init_empty_weights(include_buffers: bool = False) -> Iterator[None]:
    """Build modules in the block with parameters on torch's meta device, which takes no memory.

    Buffers are created normally by default, since their values are often computed and not in checkpoints. Modules built
    by other threads are not affected.
    """
    with init_on_device("meta", include_buffers=include_buffers):
        yield


@contextmanager
def init_on_device(device: torch.device | str | int, include_buffers: bool = False) -> Iterator[None]:
    """Build modules in the block with parameters on ``device``, and buffers too if ``include_buffers``.

    Each parameter moves when it is registered, so that its first values are drawn on the device. Tied parameters stay
    tied.
    """
    moves = _MoveHooks(torch.device(device))
    on_parameter: Any = nn_module.register_module_parameter_registration_hook  # annotated as if hooks returned None
    on_buffer: Any = nn_module.register_module_buffer_registration_hook
    handles = [on_parameter(moves.parameter)]
    if include_buffers:
        handles.append(on_buffer(moves.buffer))
    try:
        with _MmapAllocation():
            yield
    finally:
        for handle in handles:
            handle.remove()


class _MmapAllocation(TorchFunctionMode):
    """Allocates large empty tensors by mmap, so that their memory returns to the system when they are freed.

    malloc retains freed memory between live allocations, until a memory limit is reached.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.empty or kwargs.keys() - {"device", "dtype"}:
            return func(*args, **kwargs)
        if not device_type(torch.get_default_device()).is_host:
            return func(*args, **kwargs)
        if kwargs.get("device") is not None and not device_type(torch.device(kwargs["device"])).is_host:
            return func(*args, **kwargs)
        like = func(*args, **{**kwargs, "device": "meta"})
        return empty_tensors([(like.shape, like.dtype)])[0]


class _MoveHooks:
    """Registration hooks that act only in the thread that created them; torch's are process-wide."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._thread = threading.get_ident()
        self._moved: Any = WeakIdKeyDictionary()

    def parameter(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or not self._must_move(parameter):
            return None
        if parameter not in self._moved:
            made = clone_parameter_onto(parameter, parameter.detach().to(self._device))
            # One that is registered again is not moved again: tensors on "cuda" have the device "cuda:0".
            self._moved[parameter] = self._moved[made] = made
        return self._moved[parameter]

    def buffer(self, module: nn.Module, name: str, buffer: Tensor | None) -> Tensor | None:
        if buffer is None or not self._must_move(buffer):
            return None
        if buffer not in self._moved:
            made = buffer.to(self._device)
            self._moved[buffer] = self._moved[made] = made
        return self._moved[buffer]

    def _must_move(self, tensor: Tensor) -> bool:
        return threading.get_ident() == self._thread and tensor.device != self._device and not is_lazy(tensor)


def clone_parameter_onto(parameter: nn.Parameter, data: Tensor) -> nn.Parameter:
    """Return a parameter with the class and attributes of ``parameter`` that holds ``data``."""
    made = type(parameter)(data, requires_grad=parameter.requires_grad)
    for name, value in vars(parameter).items():
        setattr(made, name, value)
    return made
