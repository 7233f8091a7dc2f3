"""Exchanges among the ranks that hold shards of the same sequences, as operations with gradients of any order.

A *whole* tensor is equal on all ranks, and so is its gradient. A rank's *shard* of it is a range along one dim.
Gradients of results computed from shards are multiplied by the number of ranks, so that their average is their sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function


class Exchange(Protocol):
    """The methods of a communicator that `SequenceExchange` calls."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Replace ``tensor`` by the sum over all ranks, and return it."""
        ...

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's tensor, in rank order; shapes and dtypes must be equal on all ranks."""
        ...

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Send one part to each rank, and return the parts received from each, in rank order."""
        ...


class SequenceExchange:
    """Exchanges shards of sequences among ``size`` ranks; each must make the same calls, also in the backward pass."""

    def __init__(self, comm: Exchange, rank: int, size: int) -> None:
        self.comm = comm
        self.rank = rank
        self.size = size

    def range_of(self, length: int, rank: int | None = None) -> tuple[int, int]:
        """Return the start and length of a rank's shard of ``length`` items; the first ranks have the remainder."""
        rank = self.rank if rank is None else rank
        each, rest = divmod(length, self.size)
        return each * rank + min(rank, rest), each + (rank < rest)

    def shard(self, whole: Tensor, dim: int) -> Tensor:
        """Return this rank's shard of a whole tensor."""
        return _Shard.apply(whole, self, dim)  # pyright: ignore[reportReturnType]

    def join(self, shard: Tensor, dim: int, length: int) -> Tensor:
        """Return the whole tensor of the ranks' shards."""
        return _Join.apply(shard, self, dim, length)  # pyright: ignore[reportReturnType]

    def replicate(self, whole: Tensor) -> Tensor:
        """Return a whole tensor, for computation with shards: its gradient is the average over the ranks."""
        return _Replicate.apply(whole, self)  # pyright: ignore[reportReturnType]

    def gather(self, shard: Tensor, dim: int, length: int) -> Tensor:
        """Return all ranks' shards, for computation with this rank's; the gradient of a shard is summed over ranks."""
        return _Gather.apply(shard, self, dim, length)  # pyright: ignore[reportReturnType]

    def gather_sequence(self, shard: Tensor, dim: int, other: int, length: int) -> Tensor:
        """Return the whole sequence ``dim`` for this rank's shard of the dim ``other``, such as heads (all-to-all)."""
        return _AllToAll.apply(shard, self, other, dim, shard.shape[other], length)  # pyright: ignore[reportReturnType]

    def scatter_sequence(self, part: Tensor, dim: int, other: int, number: int) -> Tensor:
        """Undo `gather_sequence`: return this rank's shard of the sequence, and all ``number`` items of ``other``."""
        return _AllToAll.apply(part, self, dim, other, part.shape[dim], number)  # pyright: ignore[reportReturnType]

    def all_set(self, flag: bool) -> bool:
        """Return whether the flag is set on all ranks."""
        return int(self.comm.all_reduce(torch.tensor([int(flag)], device="cpu"))) == self.size

    # --- without gradients ---

    def narrow(self, whole: Tensor, dim: int) -> Tensor:
        """Return this rank's shard as a view."""
        return whole.narrow(dim, *self.range_of(whole.shape[dim]))

    def gathered(self, shard: Tensor, dim: int, length: int) -> Tensor:
        """Return all ranks' shards of a dim with ``length`` items in one tensor."""
        longest = -(-length // self.size)
        sent = shard.movedim(dim, 0).contiguous()
        if len(sent) < longest:
            sent = torch.cat([sent, sent.new_zeros(longest - len(sent), *sent.shape[1:])])
        found = self.comm.all_gather(sent)
        parts = [part[: self.range_of(length, rank)[1]].movedim(0, dim) for rank, part in enumerate(found)]
        return torch.cat(parts, dim)

    def all_to_all_dims(self, value: Tensor, sharded_dim: int, gathered_dim: int, number: int, length: int) -> Tensor:
        """Return a value sharded along ``sharded_dim`` (``number`` items), whole along the other dim (``length``)."""
        parts: list[Tensor] = []
        shapes: list[list[int]] = []
        own = list(value.shape)
        own[sharded_dim] = self.range_of(number)[1]
        for rank in range(self.size):
            parts.append(value.narrow(sharded_dim, *self.range_of(number, rank)).contiguous())
            shapes.append([*own])
            shapes[-1][gathered_dim] = self.range_of(length, rank)[1]
        return torch.cat(self.comm.all_to_all(parts, shapes), gathered_dim)


class _Shard(Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, exchange: SequenceExchange, dim: int) -> Tensor:
        ctx.arguments = exchange, dim, whole.shape[dim]
        return exchange.narrow(whole, dim).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        exchange, dim, length = ctx.arguments
        return _Join.apply(gradients[0] / exchange.size, exchange, dim, length), None, None


class _Join(Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, exchange: SequenceExchange, dim: int, length: int) -> Tensor:
        ctx.arguments = exchange, dim
        return exchange.gathered(shard, dim, length)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        exchange, dim = ctx.arguments
        own: Any = _Shard.apply(gradients[0], exchange, dim)
        return own * exchange.size, None, None, None


class _Replicate(Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, exchange: SequenceExchange) -> Tensor:
        ctx.exchange = exchange
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _Average.apply(gradients[0], ctx.exchange), None


class _Average(Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, exchange: SequenceExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.comm.all_reduce(part.clone(memory_format=torch.contiguous_format)).div_(exchange.size)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _Replicate.apply(gradients[0], ctx.exchange), None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, exchange: SequenceExchange, dim: int, length: int) -> Tensor:
        ctx.arguments = exchange, dim
        return exchange.gathered(shard, dim, length)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _Sum.apply(gradients[0], *ctx.arguments), None, None, None


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, exchange: SequenceExchange, dim: int) -> Tensor:
        ctx.arguments = exchange, dim, part.shape[dim]
        total = exchange.comm.all_reduce(part.clone(memory_format=torch.contiguous_format))
        return exchange.narrow(total, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _Gather.apply(gradients[0], *ctx.arguments), None, None


class _AllToAll(Function):
    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        exchange: SequenceExchange,
        sharded_dim: int,
        gathered_dim: int,
        number: int,
        length: int,
    ) -> Tensor:
        ctx.arguments = exchange, gathered_dim, sharded_dim, length, number
        return exchange.all_to_all_dims(value, sharded_dim, gathered_dim, number, length)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _AllToAll.apply(gradients[0], *ctx.arguments), None, None, None, None, None
