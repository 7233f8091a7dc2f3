"""Local SGD: ranks step with their own gradients, and weights are averaged every few steps."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from torch import nn

from accel_nb.accelerator.training.replica_averaging import average_weights
from accel_nb.accelerator.training.run_control import TrainingStopped
from accel_nb.errors import MisuseError

if TYPE_CHECKING:
    from accel_nb.accelerator.core import Accelerator


class LocalSGD:
    """Trains a prepared model without averaging gradients; call `step` after each optimizer step.

    Inside of the block floating-point parameters and buffers are averaged instead, in a few large messages: after every
    ``local_sgd_steps`` optimizer steps, and at the end of the block. At the end the optimizer's state is averaged too,
    so that all ranks continue with equal state; the state of a parameter that some rank has not updated is removed.
    Every rank must make the same number of steps. With one rank, or ``enabled=False``, nothing changes.

    Weights and optimizer state are averaged before a checkpoint is saved, too. If an error ends the block, they are
    averaged at the next point that all ranks reach: the beginning of a loop over a prepared loader or of another block,
    or a save. `Accelerator.backward` raises `MisuseError` before that.

    With ``local_sgd_steps=1``, SGD, with or without momentum, and no clipping of gradients, the result is the same as
    with averaged gradients.

    Raises `MisuseError` for a model that is not prepared, a strategy that shards it, a number of steps below 1, and
    float16, whose loss scale would differ between ranks.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, local_sgd_steps: int, enabled: bool = True) -> None:
        self._stepper = accelerator.components.stepper
        self._comm = accelerator.components.comm
        self._model = model
        self._period = local_sgd_steps
        self._is_enabled = enabled and accelerator.num_processes > 1
        self._num_steps = 0
        strategy = self._stepper.strategy
        if type(local_sgd_steps) is not int or local_sgd_steps < 1:
            raise MisuseError(f"local_sgd_steps is {local_sgd_steps!r}; it must be a whole number of at least 1")
        if not any(known is model for known in self._stepper.bundle.models):
            raise MisuseError(f"this {type(model).__name__} is not prepared; call accelerator.prepare(model) before")
        if self._is_enabled and not strategy.capabilities.supports_local_gradients:
            raise MisuseError(
                f"the strategy {strategy.name!r} shards the model over the ranks, so there is nothing to average"
            )
        if self._is_enabled and strategy.precision.policy.loss_scaling:
            raise MisuseError("in fp16 each rank of LocalSGD would have a loss scale of its own; use bf16 or no")

    def __enter__(self) -> LocalSGD:
        """Stop averaging gradients."""
        if self._is_enabled:
            self._stepper.begin_local_steps(self._model)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Average weights and optimizer state, and resume averaging gradients."""
        if self._is_enabled:
            # Every rank is stopped after the same step; another error may be raised on this rank alone.
            is_on_all_ranks = kind is None or issubclass(kind, TrainingStopped)
            self._stepper.end_local_steps(self._model, averages=is_on_all_ranks)

    def step(self) -> None:
        """Count an optimizer step, and average weights if that is due; do nothing inside of an accumulation window."""
        if not self._is_enabled or not self._stepper.window.syncs_gradients:
            return
        self._num_steps += 1
        if self._num_steps % self._period == 0:
            average_weights(self._comm, self._model)
