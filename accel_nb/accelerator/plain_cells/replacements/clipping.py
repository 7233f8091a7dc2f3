"""torch's functions that clip gradients, in plain cells."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from accel_nb.accelerator.core import Accelerator


def replace_clip_norm(accelerator: Accelerator, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a `clip_grad_norm_` that completes and unscales the gradients of prepared parameters first."""
    stepper = accelerator.components.stepper

    @functools.wraps(original)
    def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Tensor:
        clipped = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if not stepper.has_any_parameter(clipped):
            return original(clipped, max_norm, norm_type, *args, **kwargs)
        bundle = stepper.complete_gradients(clipped)
        if bundle is None:
            return stepper.clip_norm(clipped, max_norm, norm_type)
        for optimizer in bundle.optimizers:
            stepper.strategy.unscale(optimizer)
        mesh = accelerator.components.groups.mesh
        # torch's function cannot combine tensors of several meshes, and computes with parameter.grad.
        if not mesh.has_one_dimension or stepper.strategy.capabilities.holds_gradients:
            norm = stepper.strategy.clip_grad_norm(bundle, max_norm, norm_type, clipped)
            if (args[0] if args else kwargs.get("error_if_nonfinite")) and not bool(norm.isfinite()):
                raise RuntimeError(f"the total norm of order {norm_type} of the gradients is {norm.item()}")
        else:
            norm = original(clipped, max_norm, norm_type, *args, **kwargs)
        stepper.meter.report_norm(norm)
        return norm

    return clip_grad_norm_


def replace_clip_value(accelerator: Accelerator, original: Callable[..., None]) -> Callable[..., None]:
    """Return a `clip_grad_value_` that completes and unscales the gradients of prepared parameters first."""
    stepper = accelerator.components.stepper

    @functools.wraps(original)
    def clip_grad_value_(parameters: Any, clip_value: float, *args: Any, **kwargs: Any) -> None:
        clipped = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if not stepper.has_any_parameter(clipped):
            original(clipped, clip_value, *args, **kwargs)
            return
        bundle = stepper.complete_gradients(clipped)
        if bundle is None:
            return
        for optimizer in bundle.optimizers:
            stepper.strategy.unscale(optimizer)
        if stepper.strategy.capabilities.holds_gradients:
            stepper.strategy.clip_grad_value(bundle, clip_value, clipped)
        else:
            original(clipped, clip_value, *args, **kwargs)

    return clip_grad_value_
