"""Conversion of the loss that an optimizer's closure returns to the loss of the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.runtime.world import World


class ClosureLoss:
    """Weights the loss that a closure returns by the same factors as the gradients of its backward passes."""

    def __init__(self, world: World, comm: Communicator) -> None:
        self._world = world
        self._comm = comm
        # While a closure runs: the factors of its backward passes, and the sum of their losses times these; else None.
        self._factors: list[float | Tensor] | None = None
        self._sum: float | Tensor = 0.0

    def add(self, loss: Tensor, factor: float | Tensor) -> None:
        """Add a backward pass, of a loss that was multiplied by ``factor``, if it runs in a closure."""
        if self._factors is not None:
            self._factors.append(factor)
            self._sum = self._sum + loss.detach()

    def evaluate(self, closure: Callable[[], Any]) -> Any:
        """Call a closure and return the loss of the whole batch; every rank must call.

        A line search, as in L-BFGS, depends on the loss, and all ranks must get the same value. Passes of losses with
        different factors are added up. An optimizer that steps another one passes its closure on: then the inner call
        determines the loss.
        """
        if self._factors is not None:
            return closure()
        self._factors, self._sum = [], 0.0
        try:
            loss = closure()
            factors, own = self._factors, self._sum
        finally:
            self._factors, self._sum = None, 0.0
        if not factors or not isinstance(loss, Tensor | float) or (isinstance(loss, Tensor) and loss.numel() != 1):
            return loss
        if all(_are_equal(factor, factors[0]) for factor in factors):
            own = _weighted(loss, factors[0])
        own = torch.as_tensor(own, dtype=torch.float64, device=self._world.device).reshape(1)
        return _with_value(loss, self._comm.all_reduce(own.clone(), "mean"))


def _are_equal(factor: float | Tensor, other: float | Tensor) -> bool:
    return factor is other or (not isinstance(factor, Tensor) and not isinstance(other, Tensor) and factor == other)


def _weighted(loss: Tensor | float, factor: float | Tensor) -> float | Tensor:
    """Return a loss times its factor; 0 for a share without weight, whose loss may be NaN."""
    own = loss.detach() if isinstance(loss, Tensor) else loss
    if isinstance(factor, Tensor):
        return (own * factor).where(factor != 0, 0.0)
    return own * factor if factor else 0.0


def _with_value(loss: Tensor | float, value: Tensor) -> Tensor | float:
    """Return a loss with another value; a tensor keeps its autograd graph, as on one device."""
    if not isinstance(loss, Tensor):
        return value.item()
    if loss.is_leaf:
        return value.to(loss.device, loss.dtype).reshape(loss.shape)
    loss.data.copy_(value.reshape(loss.shape))
    return loss
