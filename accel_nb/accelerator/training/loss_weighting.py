"""Weights of losses: of the share of a batch that a rank computes, and of losses that are sums.

A batch is divided among ranks, and every rank computes the loss of its share. For the ranks' gradients to combine to
the gradients of the whole batch, a mean over samples is weighted by the number of samples, a sum over samples by 1, and
a weighted mean (over tokens that are not ignored, with class weights or a mask) by its total weight.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from accel_nb.accelerator.training.accumulation import AccumulationWindow
from accel_nb.accelerator.training.loss_classification import LossClassifier, LossReduction, WeightedLoss
from accel_nb.data.order import BatchShare
from accel_nb.errors import MisuseError
from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.runtime.world import World

_TINY = 1e-12
_NO_WEIGHTS_IN_JOIN = (
    "backward got a weight inside of join_uneven_inputs, where ranks that have run out of data cannot add theirs: "
    "leave the weight out, or divide the data evenly instead of joining"
)


class LossWithFactor(NamedTuple):
    """A loss, its ``factor`` for the backward pass, and the loss value that the user is ``shown``."""

    loss: Tensor
    factor: float | Tensor
    shown: Tensor


class LossWeights:
    """Weights the losses of one rank, so that all ranks' gradients combine to the gradients of the whole batch."""

    def __init__(self, world: World, comm: Communicator) -> None:
        # Whether a loss that is a sum over samples stays a sum over the whole batch, as on one device.
        self.preserves_sums = False
        self._world = world
        self._comm = comm
        self._sums = _WindowWeights(world, comm)
        self._classifier = LossClassifier(warns=world.is_main)
        # By the kind of a loss: whether ranks exchange its weights.
        self._exchanges: dict[str, bool] = {}

    def classify(self, loss: Tensor, share: BatchShare | None) -> LossReduction:
        """Return how a loss over a share is reduced."""
        if share is None:
            return "mean"
        return self._classifier.classify(loss, share.total_samples if share.is_whole else share.num_samples)

    def apply_weight(
        self, loss: Tensor, weight: float | Tensor | None, window: AccumulationWindow, *, is_joined: bool
    ) -> LossWithFactor:
        """Return a loss with its factor; ``weight`` is None unless the loss is a sum with this total weight."""
        share, factor = window.share, window.mean_factor
        if weight is not None:
            if is_joined:
                raise MisuseError(_NO_WEIGHTS_IN_JOIN)
            factor = self._sums.add(weight, share, loss, is_new=not window.has_gradients)
            return LossWithFactor(loss, factor, mean_of_sum(loss.detach(), weight))
        self._sums.add_unweighted(is_new=not window.has_gradients)
        if share is None:
            return LossWithFactor(loss, factor, loss)
        if self.preserves_sums and not share.is_whole and not is_joined:
            reduction = self._classifier.classify(loss, share.num_samples)
            if reduction == "sum":
                factor = window.sum_factor
            elif reduction != "mean" and self._needs_exchange(reduction):
                factor_of_share = self._factor_of_share(reduction.total, share, window.size).to(loss.dtype)
                # If all targets of a share are ignored, its loss is 0 / 0, and so is its gradient.
                has_weight = factor_of_share != 0
                reduction.drop_gradient_unless(has_weight)
                return LossWithFactor(loss, factor_of_share, loss.detach().where(has_weight, 0.0))
        elif window.has_uneven_share and self._classifier.is_normalized(loss, share.num_samples):
            factor = window.even_factor
        return LossWithFactor(loss, factor, loss)

    def factor_of_pass(
        self, weight: float | Tensor | None, share: BatchShare | None, *, is_new: bool, mean_factor: float
    ) -> float | Tensor:
        """Return the factor of a loss that is not yet computed."""
        if weight is None:
            self._sums.add_unweighted(is_new=is_new)
            return mean_factor
        like = torch.empty((), dtype=torch.float64, device=self._world.device)
        return self._sums.add(weight, share, like, is_new=is_new)

    def refuse_weight(self, weight: float | Tensor | None, *, is_joined: bool) -> None:
        """Raise `MisuseError` for a weight where ranks without data take part in the steps of others."""
        if weight is not None and is_joined:
            raise MisuseError(_NO_WEIGHTS_IN_JOIN)

    def rescaling(self, number: int, otherwise: float) -> float | Tensor:
        """Return the factor for the gradients of window ``number``; every rank must call for each window."""
        return self._sums.rescaling(number, otherwise)

    def _needs_exchange(self, reduction: WeightedLoss) -> bool:
        """Return whether ranks exchange the weights of such losses, found once for each kind; every rank calls."""
        is_needed = self._exchanges.get(reduction.key)
        if is_needed is None:
            own = torch.tensor([reduction.needs_exchange], dtype=torch.int32, device=reduction.total.device)
            is_needed = self._exchanges[reduction.key] = bool(self._comm.all_reduce(own, "max"))
        return is_needed

    def _factor_of_share(self, weight: Tensor, share: BatchShare, window_size: int) -> Tensor:
        """Return the factor for a loss of this total weight; the mean over ranks is then the whole loss."""
        own = weight.detach().to(torch.float64).reshape(1) * bool(share.num_samples)
        return (own / self._comm.all_reduce(own.clone()) * (self._world.size / window_size)).reshape(())


def mean_of_sum(loss: Tensor, weight: float | Tensor) -> Tensor:
    """Return a loss that is a sum divided by the number of its summands; without summands it is returned unchanged."""
    return (loss / weight).where(torch.as_tensor(weight, device=loss.device) != 0, loss)


class _WindowWeights:
    """Weights of losses that are sums, such as token counts: gradients are divided by the total weight of a window.

    Inside of a window, losses are divided by the total weight of the previous window, so that gradients stay within the
    range of half precision. At the end of the window gradients are rescaled by its own total, for which every rank
    sends one number.
    """

    def __init__(self, world: World, comm: Communicator) -> None:
        self._world = world
        self._comm = comm
        # Whether the losses of the current window have weights.
        self._is_weighted = False
        self._sum: Tensor | None = None
        self._scale: Tensor | None = None
        self._finished: tuple[int, Tensor] | None = None

    def add_unweighted(self, *, is_new: bool) -> None:
        """Record a loss without a weight; raises `MisuseError` if other losses of its window have one."""
        if self._is_weighted:
            self._set_weighted(False, is_new=is_new)

    def add(self, weight: float | Tensor, share: BatchShare | None, like: Tensor, *, is_new: bool) -> Tensor:
        """Return the factor of a loss, of the dtype and on the device of ``like``.

        In the very first call the ranks exchange their weights.
        """
        self._set_weighted(True, is_new=is_new)
        is_filler = share is not None and not share.num_samples  # a filler sample of an empty share
        own = torch.as_tensor(weight, dtype=torch.float64, device=like.device).detach().reshape(1) * (not is_filler)
        self._sum = own.clone() if is_new or self._sum is None else self._sum + own
        if self._scale is None:
            self._scale = self._comm.all_reduce(own.clone()).clamp(min=_TINY)
        return (self._world.size / self._scale * (not is_filler)).to(like.dtype).reshape(())

    def rescaling(self, number: int, otherwise: float) -> float | Tensor:
        """Return the factor for the gradients of window ``number``; every rank must call for each window."""
        if not self._is_weighted or self._sum is None or self._scale is None:
            return otherwise
        if self._finished is None or self._finished[0] != number:
            total = self._comm.all_reduce(self._sum.clone()).clamp(min=_TINY)
            self._finished = number, (self._scale / total).reshape(())
            self._scale = total
        return self._finished[1]

    def _set_weighted(self, is_weighted: bool, *, is_new: bool) -> None:
        if not is_new and self._is_weighted != is_weighted:
            raise MisuseError(
                "backward was called with and without weight in one accumulation window; give every loss of a window "
                "its weight, or none"
            )
        self._is_weighted = is_weighted
