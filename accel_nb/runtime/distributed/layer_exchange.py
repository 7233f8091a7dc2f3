"""Sums over the ranks that compute parts of one layer, as operations with gradients of any order.

A *whole* tensor is equal on all ranks, and so is its gradient. A layer that is divided by its outputs takes a whole
tensor, and each rank computes a summand of the tensor's gradient; a layer that is divided by its inputs computes on
each rank a summand of its output.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function


class Reduction(Protocol):
    """The methods of a communicator that `LayerExchange` calls."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Replace ``tensor`` by the sum over all ranks, and return it."""
        ...


class LayerExchange:
    """Exchanges activations among the ranks of ``comm``; each must make the same calls, also in the backward pass."""

    def __init__(self, comm: Reduction) -> None:
        self.comm = comm
        # While a group of layers computes: its whole input tensors, and the results of `replicate` for them.
        self._entered: list[tuple[Tensor, Tensor]] | None = None

    @property
    def is_in_group(self) -> bool:
        """Whether a group of layers computes, inside of `shared_inputs`."""
        return self._entered is not None

    def replicate(self, whole: Tensor) -> Tensor:
        """Return a whole tensor, as input of the layer's part on this rank: its gradient is summed over ranks."""
        if not (torch.is_grad_enabled() and whole.requires_grad):
            return whole
        for known, result in self._entered or ():
            if known is whole:
                return result
        result: Any = _Replicate.apply(whole, self.comm)
        if self._entered is not None:
            self._entered.append((whole, result))
        return result

    def sum_parts(self, part: Tensor) -> Tensor:
        """Return the sum of the ranks' parts, computed in place in ``part``, which must not be used otherwise."""
        return _SumParts.apply(part, self.comm)  # pyright: ignore[reportReturnType]

    @contextmanager
    def shared_inputs(self) -> Iterator[None]:
        """Sum the gradient of a tensor that several layers take inside of the block once, not once for each layer."""
        before, self._entered = self._entered, []
        try:
            yield
        finally:
            self._entered = before


class _Replicate(Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, comm: Reduction) -> Tensor:
        ctx.comm = comm
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _SumParts.apply(gradients[0].clone(memory_format=torch.contiguous_format), ctx.comm), None


class _SumParts(Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, comm: Reduction) -> Tensor:
        ctx.comm = comm
        ctx.mark_dirty(part)
        return comm.all_reduce(part)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _Replicate.apply(gradients[0], ctx.comm), None
