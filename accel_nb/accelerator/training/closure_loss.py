"""The loss of an optimizer's closure as that of the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.runtime.world import World


class ClosureLoss:
    """Adds up the losses that a closure passes to backward, each weighted as its gradients are."""

    def __init__(self, world: World, comm: Communicator) -> None:
        self._world = world
        self._comm = comm
        # The sum while a closure runs, else None.
        self._sum: Tensor | None = None

    def add(self, loss: Tensor) -> None:
        """Add the weighted loss of a backward pass, if it runs in a closure."""
        if self._sum is not None:
            self._sum = self._sum + loss.detach()

    def evaluate(self, closure: Callable[[], Any]) -> Any:
        """Call a closure and return its loss as that of the whole batch; every rank calls.

        A line search, as in L-BFGS, depends on the loss, and all ranks must get the same value. An optimizer that steps
        another one passes its closure on: the loss is then that of the inner call.
        """
        if self._sum is not None:
            return closure()
        self._sum = start = torch.zeros((), device=self._world.device)
        try:
            loss = closure()
            total = self._sum
        finally:
            self._sum = None
        if total is start or not isinstance(loss, Tensor | float):
            return loss
        total = self._comm.all_reduce(total.to(torch.float64).reshape(1), "mean").reshape(())
        return _with_value(loss, total)


def _with_value(loss: Tensor | float, value: Tensor) -> Tensor | float:
    """Return a loss with another value: a tensor that was computed keeps its graph, as on one device."""
    if not isinstance(loss, Tensor):
        return value.item()
    if loss.is_leaf:
        return value.to(loss.dtype)
    loss.data.copy_(value)
    return loss
