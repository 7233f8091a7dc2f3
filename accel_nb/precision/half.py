"""Full precision, bfloat16 (with or without float8) and float16, by PyTorch's autocast and gradient scaler."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from accel_nb.config.sections import AutocastOptions, ScalerOptions
from accel_nb.errors import ConfigError
from accel_nb.precision.choice import choose_precision
from accel_nb.precision.policy import Precision, PrecisionPolicy
from accel_nb.runtime.tensors.nested import map_tensors
from accel_nb.runtime.tensors.stepped import stepped_parameters


class FullPrecision:
    """Leaves every dtype as it is."""

    policy = PrecisionPolicy("no")

    @property
    def scaler(self) -> GradScaler | None:
        """None: losses are not scaled."""
        return None

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context that changes nothing."""
        return nullcontext()

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss as it is."""
        return loss

    def unscale_(self, optimizer: Optimizer) -> None:
        """Do nothing."""

    def step(self, optimizer: Optimizer) -> bool:
        """Step the optimizer."""
        optimizer.step()
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: there is no state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing."""


class BFloat16(FullPrecision):
    """Computes in bfloat16 under autocast; weights, gradients and outputs stay in float32."""

    policy = PrecisionPolicy("bf16", compute=torch.bfloat16, output=torch.float32)

    def __init__(self, device: torch.device, autocast: AutocastOptions | None = None) -> None:
        self._autocast = _autocast(device, torch.bfloat16, autocast or AutocastOptions())

    def autocast(self) -> AbstractContextManager[Any]:
        """Return torch's autocast for bfloat16."""
        return self._autocast()


class Float8(BFloat16):
    """Computes in bfloat16 under autocast, except in layers that `accel_nb.precision.fp8` converts to float8."""

    policy = PrecisionPolicy("fp8", compute=torch.bfloat16, output=torch.float32)


class Float16:
    """Computes in float16 under autocast, with a scaled loss so that small gradients do not vanish."""

    policy = PrecisionPolicy("fp16", compute=torch.float16, output=torch.float32, loss_scaling=True)

    def __init__(
        self, device: torch.device, autocast: AutocastOptions | None = None, scaler: ScalerOptions | None = None
    ) -> None:
        self._autocast = _autocast(device, torch.float16, autocast or AutocastOptions())
        self._scaler = _scaler(device, scaler or ScalerOptions())
        # By id, the optimizers that have unscaled or stepped since the scale was adapted.
        self._steppables: dict[int, _Steppable] = {}
        self._must_update = False

    def autocast(self) -> AbstractContextManager[Any]:
        """Return torch's autocast for float16."""
        return self._autocast()

    @property
    def scaler(self) -> GradScaler:
        """PyTorch's scaler of this run's losses."""
        return self._scaler

    def scale(self, loss: Tensor) -> Tensor:
        """Return the scaled loss."""
        if self._must_update or self._were_gradients_dropped():
            self._update()
        return self._scaler.scale(loss)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale, and check them for infinities and NaN."""
        steppable = self._steppable(optimizer)
        if not steppable.is_unscaled:
            self._scaler.unscale_(steppable)
            steppable.is_unscaled = True

    def step(self, optimizer: Optimizer) -> bool:
        """Step the optimizer unless its gradients overflowed."""
        if not has_gradient(optimizer):
            optimizer.step()  # the scaler raises if there is nothing to unscale
            return True
        self.unscale_(optimizer)
        steppable = self._steppable(optimizer)
        steppable.ran = False
        self._scaler.step(steppable)
        self._must_update = True
        return steppable.ran

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and its history."""
        if self._must_update:
            self._update()
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the scale and its history."""
        if self._must_update:
            self._update()
        self._scaler.load_state_dict(state)

    def _update(self) -> None:
        """Adapt the scale after a step, before the next backward pass.

        Not right after the step: other optimizers that step after the same backward pass have gradients of the same
        scale, which would then be divided by a different one.
        """
        self._scaler.update()
        self._steppables.clear()
        self._must_update = False

    def _were_gradients_dropped(self) -> bool:
        """Return whether the unscaled gradients were cleared without a step."""
        unscaled = [steppable for steppable in self._steppables.values() if steppable.is_unscaled]
        return bool(unscaled) and not any(
            optimizer is not None and has_gradient(optimizer) for optimizer in (item.optimizer for item in unscaled)
        )

    def _steppable(self, optimizer: Optimizer) -> Any:
        steppable = self._steppables.get(id(optimizer))
        if steppable is None or steppable.optimizer is not optimizer:
            steppable = self._steppables[id(optimizer)] = _Steppable(optimizer)
        return steppable


class _Steppable:
    """An optimizer for torch's scaler, which records whether the scaler ran its step.

    It has no support for steps that skip themselves on overflow, as fused optimizers do: then it would be unknown
    whether a step was skipped, on which learning rate schedules depend. It does not keep the optimizer alive.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._reference = weakref.ref(optimizer)
        self.is_unscaled = False
        self.ran = False

    @property
    def optimizer(self) -> Optimizer | None:
        return self._reference()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else self.optimizer.param_groups

    def step(self) -> None:
        self.ran = True
        if self.optimizer is not None:
            self.optimizer.step()


def has_gradient(optimizer: Optimizer) -> bool:
    """Return whether any parameter of the optimizer has a gradient."""
    return any(value.grad is not None for value in stepped_parameters(optimizer))


def _autocast(device: torch.device, dtype: torch.dtype, options: AutocastOptions) -> Callable[[], Any]:
    """Return a function that makes torch's autocast contexts."""
    is_enabled, has_cache = options.enabled, options.cache_enabled
    return lambda: torch.autocast(device.type, dtype=dtype, enabled=is_enabled, cache_enabled=has_cache)


def _scaler(device: torch.device, options: ScalerOptions) -> GradScaler:
    return GradScaler(
        device.type,
        init_scale=options.init_scale,
        growth_factor=options.growth_factor,
        backoff_factor=options.backoff_factor,
        growth_interval=options.growth_interval,
        enabled=options.enabled,
    )


def build_precision(
    name: str,
    device: torch.device | str,
    *,
    autocast: AutocastOptions | None = None,
    scaler: ScalerOptions | None = None,
) -> Precision:
    """Return the precision called ``name`` (``no``, ``bf16``, ``fp16``, ``fp8`` or ``auto``) on a device.

    Raises `ConfigError` for an unknown name.
    """
    device = torch.device(device)
    chosen = choose_precision(name, device)
    if chosen == "no":
        return FullPrecision()
    if chosen == "bf16":
        return BFloat16(device, autocast)
    if chosen == "fp8":
        return Float8(device, autocast)
    if chosen == "fp16":
        return cast(Precision, Float16(device, autocast, scaler))
    raise ConfigError(f"precision {name!r} is unknown; there are no, fp16, bf16, fp8 and auto")


def cast_half_floats(nested: Any, dtype: torch.dtype) -> Any:
    """Return nested data, such as a model's output, with every half precision tensor converted to ``dtype``."""
    if isinstance(nested, Tensor):
        return nested.to(dtype) if nested.dtype in (torch.float16, torch.bfloat16) else nested

    return map_tensors(lambda tensor: cast_half_floats(tensor, dtype), nested)
