"""Local SGD: ranks step with their own gradients, and weights are averaged every few steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accel_nb.errors import MisuseError
from accel_nb.runtime.distributed.collectives import all_reduce_bucketed

if TYPE_CHECKING:
    from accel_nb.accelerator.core import Accelerator


class LocalSGD:
    """Trains a prepared model without averaging gradients; call `step` after each optimizer step.

    Inside of the block parameters and buffers, but those of integers, are averaged instead, in a few large messages:
    after every ``local_sgd_steps`` optimizer steps, and at the end of the block. At the end the optimizer's state is
    averaged too, so that all ranks continue with equal state; that of a parameter which one rank has not updated is
    removed. Every rank must make the same number of steps. With one rank, or ``enabled=False``, nothing changes.

    With ``local_sgd_steps=1``, SGD, with or without momentum, and no clipping of gradients, the result is the same
    as that of averaging gradients.

    Raises `MisuseError` for a model that is not prepared, a strategy that shards it, a number of steps below 1, and
    float16, whose loss scale would differ between ranks.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, local_sgd_steps: int, enabled: bool = True) -> None:
        self._stepper = accelerator.components.stepper
        self._comm = accelerator.components.comm
        self._accelerator = accelerator
        self._model = model
        self._period = local_sgd_steps
        self._is_enabled = enabled and accelerator.num_processes > 1
        self._num_steps = 0
        strategy = self._stepper.strategy
        if type(local_sgd_steps) is not int or local_sgd_steps < 1:
            raise MisuseError(f"local_sgd_steps is {local_sgd_steps!r}; it must be a whole number of at least 1")
        if not any(known is model for known in self._stepper.bundle.models):
            raise MisuseError(f"this {type(model).__name__} is not prepared; call accelerator.prepare(model) before")
        if self._is_enabled and not strategy.capabilities.keeps_local:
            raise MisuseError(
                f"the strategy {strategy.name!r} shards the model over the ranks, so there is nothing to average"
            )
        if self._is_enabled and strategy.precision.policy.loss_scaling:
            raise MisuseError("in fp16 each rank of LocalSGD would have a loss scale of its own; use bf16 or no")

    def __enter__(self) -> LocalSGD:
        """Stop averaging gradients."""
        if self._is_enabled:
            self._stepper.set_local_gradients([self._model], True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Average weights and optimizer state, and resume averaging gradients."""
        if not self._is_enabled:
            return
        self._stepper.set_local_gradients([self._model], False)
        if kind is None:
            with torch.no_grad():
                all_reduce_bucketed(self._comm, [*self._weights(), *self._optimizer_state()], "mean")

    def step(self) -> None:
        """Count an optimizer step, and average weights if that is due; do nothing inside of an accumulation window."""
        if not self._is_enabled or not self._accelerator.sync_gradients:
            return
        self._num_steps += 1
        if self._num_steps % self._period == 0:
            with torch.no_grad():
                all_reduce_bucketed(self._comm, self._weights(), "mean")

    def _weights(self) -> Iterator[Tensor]:
        yield from (value for value in self._model.parameters() if value.requires_grad)
        yield from (value for value in self._model.buffers() if _has_mean(value))

    def _optimizer_state(self) -> Iterator[Tensor]:
        """Yield the averaged state in the order of the model's parameters, which optimizers of several ranks may lack.

        State of a parameter that one rank has not updated is removed on the others, so that it begins anew on all.
        """
        states = [
            (optimizer, parameter)
            for optimizer in self._stepper.bundle.optimizers
            for parameter in self._model.parameters()
        ]
        own = [_averaged_names(optimizer.state.get(parameter, {})) for optimizer, parameter in states]
        for (optimizer, parameter), names in zip(
            states, zip(*self._comm.all_gather_json(own), strict=True), strict=True
        ):
            if any(other != names[0] for other in names):
                optimizer.state.pop(parameter, None)
            elif names[0]:
                state = optimizer.state[parameter]
                yield from (state[name] for name in names[0])


def _averaged_names(state: Mapping[Any, Any]) -> list[Any]:
    return sorted(name for name, value in state.items() if _is_averaged(value))


def _is_averaged(value: object) -> bool:
    return isinstance(value, Tensor) and _has_mean(value) and value.dim() > 0


def _has_mean(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()
