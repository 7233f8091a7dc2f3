"""Access to ``parameter.grad`` in plain cells whose strategy holds gradients elsewhere, as DeepSpeed does."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import Tensor, nn

from accel_nb.accelerator.training.stepper import Stepper
from accel_nb.errors import MisuseError
from accel_nb.strategies.base import GradientHolding

# Modules that read and clear the values that a backward pass leaves in parameters, not the gradients held elsewhere.
_UNCHANGED = ("deepspeed", "accel_nb", "torch.optim", "torch.autograd", "torch.nn.modules.module")


class HeldGradients:
    """Replaces ``Tensor.grad`` by a property that reads and writes whole gradients of prepared parameters.

    All ranks run the code of a plain cell, so that they gather a gradient together.
    """

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper

    def replace_functions(self, stack: ExitStack, replace: Callable[[tuple[Any, ...], str, Any], object]) -> None:
        """Replace torch's functions that read or clear gradients, until the cell ends."""
        if self._stepper.strategy.capabilities.holds_gradients:
            replace((Tensor,), "grad", self._make_property)
            replace((nn.Module,), "zero_grad", self._wrap_zero_grad)

    @property
    def _holder(self) -> GradientHolding:
        return cast(GradientHolding, self._stepper.strategy)

    def _make_property(self, original: Any) -> property:
        def read(tensor: Tensor) -> Tensor | None:
            if not self._is_held(tensor):
                return original.__get__(tensor)
            return self._read(cast(nn.Parameter, tensor))

        def assign(tensor: Tensor, value: Tensor | None) -> None:
            if not self._is_held(tensor):
                original.__set__(tensor, value)
                return
            if value is not None:
                self._stepper.complete_gradients([tensor])
            self._write(cast(nn.Parameter, tensor), value)

        def delete(tensor: Tensor) -> None:
            original.__delete__(tensor)
            if self._is_held(tensor):
                self._write(cast(nn.Parameter, tensor), None)

        return property(read, assign, delete)

    def _is_held(self, tensor: Tensor) -> bool:
        stepper = self._stepper
        if id(tensor) not in stepper.averaged_parameters or stepper.is_inside_backward:
            return False
        caller = sys._getframe(2).f_globals.get("__name__", "")
        return not any(caller == name or caller.startswith(f"{name}.") for name in _UNCHANGED)

    def _read(self, parameter: nn.Parameter) -> Tensor | None:
        if self._stepper.complete_gradients([parameter]) is None:
            raise MisuseError(_INCOMPLETE)
        return self._holder.read_gradient(parameter)

    def _write(self, parameter: nn.Parameter, value: Tensor | None) -> None:
        self._holder.write_gradient(parameter, value)
        if value is None:
            self._stepper.record_dropped_gradients(parameter)

    def _wrap_zero_grad(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def zero_grad(module: nn.Module, set_to_none: bool = True) -> None:
            held = [value for value in module.parameters() if id(value) in self._stepper.averaged_parameters]
            gradients = {} if set_to_none else {value: self._read(value) for value in held}
            original(module, set_to_none)
            for parameter in held:
                gradient = gradients.get(parameter)
                self._write(parameter, None if gradient is None else torch.zeros_like(gradient))

        return zero_grad


_INCOMPLETE = (
    "parameter.grad is read inside of an accumulation window, where ranks hold the sums of their own shares: read it "
    "after the last batch of the window, or train with --strategy ddp"
)
