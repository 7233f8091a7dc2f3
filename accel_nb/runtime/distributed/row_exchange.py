"""Division of tensors into rows by rank, and its inverse, as operations with gradients of any order.

Every rank holds either the same *whole* tensor or its *rows* of it. The gradient of a whole tensor equals that on one
device. The gradient of rows is that gradient times the number of ranks, so that the average of parameter gradients
over ranks equals the gradient on one device. Both operations are linear, and up to that factor each is the derivative
of the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from accel_nb.runtime.distributed.communicator import Communicator


class RowExchange:
    """Exchanges rows among the ranks of ``comm``; every rank must make the same calls, also in the backward pass."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.num_bytes = 0
        """The total size in bytes of the tensors that `gather` has returned."""

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return self._comm.world.size

    def take(self, whole: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """Return this rank's rows of a tensor that is equal on all ranks; ``sizes`` are the rows of each rank."""
        return _Take.apply(whole, self, dim, tuple(sizes))  # pyright: ignore[reportReturnType]

    def replicate(self, whole: Tensor) -> Tensor:
        """Return a tensor that is equal on all ranks, for use in the computation of rows."""
        return _Replicate.apply(whole, self)  # pyright: ignore[reportReturnType]

    def gather(self, rows: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """Return the rows of all ranks, in rank order."""
        whole: Any = _Gather.apply(rows, self, dim, tuple(sizes))
        self.num_bytes += whole.numel() * whole.element_size()
        return whole

    def stack(self, part: Tensor) -> Tensor:
        """Return ``part`` of every rank, stacked in a new first dim, for use in the computation of rows."""
        return _Stack.apply(part, self)  # pyright: ignore[reportReturnType]

    def reduce(self, part: Tensor, weights: Tensor | None) -> Tensor:
        """Return the sum of ``part`` over ranks; with the ``weights`` of all ranks, their weighted mean."""
        return RowReduction.apply(part, self, weights)  # pyright: ignore[reportReturnType]

    def average(self, gradient: Tensor) -> Tensor:
        """Return the mean over ranks; for gradients computed from the ranks' rows, it is the gradient on one device."""
        return _Average.apply(gradient, self)  # pyright: ignore[reportReturnType]

    def own_range(self, sizes: Sequence[int]) -> tuple[int, int]:
        """Return the start and the number of this rank's rows."""
        rank = self._comm.world.rank
        return sum(sizes[:rank]), sizes[rank]

    def all_gather_rows(self, rows: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """Return the rows of all ranks without a gradient; they are sent as bytes, as backends lack some dtypes."""
        moved = rows.detach().resolve_conj().resolve_neg().movedim(dim, 0)
        length = max(sizes)
        if moved.shape[0] == length:
            padded = moved.contiguous()
        else:
            padded = moved.new_zeros(length, *moved.shape[1:])
            padded[: moved.shape[0]] = moved
        if not padded.numel():
            return rows.new_empty([*rows.shape[:dim], sum(sizes), *rows.shape[dim + 1 :]])
        gathered = self._comm.all_gather(padded.view(-1).view(torch.uint8))
        parts = [part.view(padded.dtype).view(padded.shape)[:size] for part, size in zip(gathered, sizes, strict=True)]
        # `cat` along ``dim``, since its result is not a view: user code may call `detach_`, which raises on views.
        return torch.cat([part.movedim(0, dim) for part in parts], dim)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks without a gradient."""
        return self._comm.all_reduce(tensor.detach().clone(memory_format=torch.contiguous_format))


class _Take(Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, exchange: RowExchange, dim: int, sizes: tuple[int, ...]) -> Tensor:
        ctx.arguments = exchange, dim, sizes
        return whole.narrow(dim, *exchange.own_range(sizes)).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        exchange, dim, sizes = ctx.arguments
        whole: Any = _Gather.apply(gradients[0], exchange, dim, sizes)
        return whole / exchange.num_ranks, None, None, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: RowExchange, dim: int, sizes: tuple[int, ...]) -> Tensor:
        ctx.arguments = exchange, dim, sizes
        return exchange.all_gather_rows(rows, dim, sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        exchange, dim, sizes = ctx.arguments
        own: Any = _Take.apply(gradients[0], exchange, dim, sizes)
        return own * exchange.num_ranks, None, None, None


class _Stack(Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.all_gather_rows(part[None], 0, [1] * exchange.num_ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _SumOwnElement.apply(gradients[0], ctx.exchange), None


class RowReduction(Function):
    """The value for all rows, a sum or a weighted mean, of the ranks' values for their rows."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, exchange: RowExchange, weights: Tensor | None) -> Tensor:
        """Return the value of all rows."""
        parts = exchange.all_gather_rows(part[None], 0, [1] * exchange.num_ranks)
        if weights is None:
            ctx.scale = exchange.num_ranks
            return parts.sum(0)
        weights = weights.to(parts.dtype)
        start, _ = exchange.own_range([1] * exchange.num_ranks)
        ctx.scale = weights[start] / weights.sum() * exchange.num_ranks
        weights = weights.view(-1, *[1] * part.dim())
        return parts.where(weights > 0, 0.0).mul(weights).sum(0) / weights.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient of this rank's rows, times the number of ranks."""
        return gradients[0] * ctx.scale, None, None


class _SumOwnElement(Function):
    """Sums the gradients of a stack over ranks and returns this rank's own element of the sum."""

    @staticmethod
    def forward(ctx: Any, stacked: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        start, _ = exchange.own_range([1] * exchange.num_ranks)
        return exchange.all_reduce(stacked)[start]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _Stack.apply(gradients[0], ctx.exchange), None


class _Replicate(Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _Average.apply(gradients[0], ctx.exchange), None


class _Average(Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.all_reduce(gradient) / exchange.num_ranks

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _Replicate.apply(gradients[0], ctx.exchange), None
