"""Training steps of a model whose blocks are divided into stages, by a schedule of micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from accel_nb.accelerator.training.loss_classification import LossClassifier, WeightedLoss
from accel_nb.accelerator.training.stepper import Stepper
from accel_nb.errors import MisuseError
from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.strategies.base import LayerDividing

SCHEDULES = ("gpipe", "1f1b", "zero_bubble")


class TrainingPipeline:
    """Runs the forward and backward passes of training steps by a schedule; `Accelerator.pipeline` makes it.

    Without stages (``mesh.pp`` is 1) a step is a forward and a backward pass of the whole batch.
    """

    def __init__(
        self,
        stepper: Stepper,
        comm: Communicator,
        model: nn.Module,
        loss_fn: Callable[..., Tensor],
        schedule: Literal["gpipe", "1f1b", "zero_bubble"],
    ) -> None:
        if schedule not in SCHEDULES:
            raise MisuseError(f"schedule is {schedule!r}; it must be one of {', '.join(SCHEDULES)}")
        if not callable(loss_fn):
            raise MisuseError(
                f"loss_fn is a {type(loss_fn).__name__}; it must be a function of the model's output and target"
            )
        self._stepper, self._comm, self._model, self._loss_fn = stepper, comm, model, loss_fn
        self._check_prepared()
        self._classifier = LossClassifier()
        self._schedule = None
        if stepper.strategy.capabilities.divides_layers:
            strategy = cast("LayerDividing", stepper.strategy)
            self._schedule = strategy.training_schedule(model, schedule, loss_fn, self._total_weight)

    def step(self, *args: Any, target: Any = None, weight: float | Tensor | None = None, **kwargs: Any) -> Tensor:
        """Compute the gradients of one batch, and return its loss on every rank.

        Every rank of a model replica must call. The other arguments are passed to the model. Tensors among them and in
        ``target`` that have as many rows as the batch are cut into micro-batches; ``loss_fn`` is called with the
        model's output, and ``target`` unless that is None. It returns the mean over the samples, or with ``weight`` the
        sum over that many summands, as for `Accelerator.backward`. A batch that cannot be cut into equal micro-batches
        is computed without the schedule, with the same gradients.

        Raises `MisuseError` if the losses of micro-batches do not combine to the loss of the batch, which is checked by
        value in steps 1, 2, 4, 8 and so on, and by the weights of targets in each step.
        """
        self._check_prepared()
        if self._schedule is not None:
            schedule = self._schedule

            def compute(scale: Callable[[], float | Tensor]) -> Tensor | None:
                found = schedule.step(
                    args, kwargs, target, scale, is_sum=weight is not None, holds_on_all_ranks=self._holds_on_all_ranks
                )
                if found is None:
                    return None
                stepper = self._stepper
                share = stepper.window.share
                is_divided = stepper.weights.preserves_sums and share is not None and not share.is_whole
                if weight is None and is_divided and not stepper.is_joined:
                    self._check_weights(found.weight_per_row)
                return found.loss

            loss = self._stepper.backward_by(compute, weight)
            if loss is not None:
                return loss
        output = self._model(*args, **kwargs)
        loss = self._loss_fn(output) if target is None else self._loss_fn(output, target)
        self._stepper.backward(loss, weight)
        return loss.detach()

    def _check_prepared(self) -> None:
        if all(self._model is not model for model in self._stepper.bundle.models):
            raise MisuseError(
                f"the {type(self._model).__name__} is not prepared: call accelerator.prepare(model, ...), and then "
                "accelerator.pipeline(model, loss_fn)"
            )

    def _holds_on_all_ranks(self, holds: bool) -> bool:
        """Return whether a condition holds on every rank; all ranks must call."""
        if self._stepper.strategy.data_coords()[1] == 1:
            return holds  # it depends on the batch, which is the same on all ranks
        return bool(self._comm.all_reduce(self._to_tensor(holds), "min"))

    def _check_weights(self, per_row: float) -> None:
        """Raise `MisuseError` on every rank if rows have more weight on one than on another; all ranks must call."""
        highest, lowest = self._comm.all_reduce(self._to_tensor(per_row, -per_row), "max").tolist()
        if highest != -lowest:
            raise MisuseError(
                f"a row of the batch has the weight {-lowest:g} in the loss of one rank and {highest:g} in that of "
                "another, so a schedule cannot compute the mean over the batch: return the sum over tokens in loss_fn "
                "and pass weight=number of tokens to step"
            )

    def _to_tensor(self, *values: float) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self._stepper.world.device)

    def _total_weight(self, loss: Tensor, num_rows: int) -> Tensor | None:
        """Return the total weight of a loss that is a weighted mean; None for other losses."""
        reduction = self._classifier.classify(loss, num_rows)
        return reduction.total if isinstance(reduction, WeightedLoss) else None
