"""Attention and dropout for a shard of a sequence, with the results of the whole sequence.

Attention uses the keys and values of all ranks. If the numbers of heads are multiples of the number of ranks, an
all-to-all gives each rank the whole sequence for some of the heads (Jacobs et al., "DeepSpeed Ulysses", 2023); else
each rank gathers all keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from accel_nb.errors import MisuseError
from accel_nb.runtime.distributed.sequence_exchange import SequenceExchange

AttentionKind = Literal["self", "cross"]
"""``self``: queries, keys and values are of the sharded sequence; ``cross``: keys and values are of another one."""

_current: ContextVar[SequenceShard | None] = ContextVar("shard", default=None)


OTHER_CALLS = (
    "a block does not call attention as in its first call, by which it was checked, so the sequence cannot be divided: "
    "train with --cp 1"
)

MakeMask = Callable[[tuple[int, ...], float, Tensor], Tensor]
"""Draws a dropout mask; the arguments are its shape, the probability, and a tensor of its dtype and device."""

_attention, _dropout = F.scaled_dot_product_attention, F.dropout


class SequenceShard:
    """This rank's shard of sequences of ``length`` along ``dim``, for the code of one block.

    ``kinds`` has the kind of each call of attention in order; None: the kinds are recorded in ``found``. ``make_mask``
    draws the dropout masks instead of torch.
    """

    def __init__(
        self,
        exchange: SequenceExchange,
        length: int,
        dim: int,
        kinds: tuple[AttentionKind, ...] | None = None,
        make_mask: MakeMask | None = None,
    ) -> None:
        self.exchange = exchange
        self.length = length
        self.own_length = exchange.range_of(length)[1]
        self.dim = dim
        self.found: list[AttentionKind] = []
        self._kinds = kinds
        self._make_mask = make_mask

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Replace torch's functions by the methods of this shard, in this thread."""
        token = _current.set(self)
        self.found.clear()
        try:
            yield
        finally:
            _current.reset(token)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Use torch's functions inside of the block, with dropout masks of ``make_mask`` if there is one."""
        whole = (
            None
            if self._make_mask is None
            else SequenceShard(_SINGLE_RANK, self.length, self.dim, None, self._make_mask)
        )
        token = _current.set(whole)
        try:
            yield
        finally:
            _current.reset(token)

    # --- attention ---

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Return `scaled_dot_product_attention` of this rank's queries with the keys and values of all ranks."""
        kind = self._next_kind(query, key)
        options: dict[str, Any] = {"scale": scale} | ({"enable_gqa": True} if enable_gqa else {})
        length = self.length
        if attn_mask is not None and (attn_mask.dim() < 2 or attn_mask.shape[-2] not in (1, length)):
            raise MisuseError(
                f"attn_mask has shape {tuple(attn_mask.shape)}: with --cp its dim -2 must be 1 or the length of "
                f"the whole sequence, {length}"
            )
        if kind == "cross":
            mask = self._rows_of(attn_mask, query, key.shape[-2], is_causal)
            return self._compute(query, key, value, mask, dropout_p, query.shape[:-2], None, options)
        size = self.exchange.size
        heads = query.dim() - 3
        if heads >= 0 and not query.shape[heads] % size and not key.shape[heads] % size:
            number = query.shape[heads]
            query, key, value = (self.exchange.gather_sequence(part, -2, heads, length) for part in (query, key, value))
            mask = attn_mask
            if mask is not None and mask.dim() >= 3 and mask.shape[-3] == number:
                mask = self.exchange.narrow(mask, mask.dim() - 3)
            if dropout_p and is_causal:
                mask, is_causal = _causal(query, length), False
            leading = (*query.shape[:heads], number)
            own = self._compute(query, key, value, mask, dropout_p, leading, heads, {**options, "is_causal": is_causal})
            return self.exchange.scatter_sequence(own, own.dim() - 2, heads, number)
        key, value = (self.exchange.gather(part, part.dim() - 2, length) for part in (key, value))
        mask = self._rows_of(attn_mask, query, length, is_causal)
        return self._compute(query, key, value, mask, dropout_p, query.shape[:-2], -2, options)

    def _next_kind(self, query: Tensor, key: Tensor) -> AttentionKind:
        number = len(self.found)
        if self._kinds is None:
            if query.shape[-2] != self.own_length:
                raise MisuseError("its attention is over another dim than the sequence")
            self.found.append("self" if key.shape[-2] == self.own_length else "cross")
        elif number >= len(self._kinds) or query.shape[-2] != self.own_length:
            raise MisuseError(OTHER_CALLS)
        else:
            self.found.append(self._kinds[number])
        return self.found[-1]

    def _rows_of(self, mask: Tensor | None, query: Tensor, num_keys: int, is_causal: bool) -> Tensor | None:
        """Return the part of a mask that is for the rank's queries."""
        if is_causal:
            mask = query.new_ones(self.length, num_keys, dtype=torch.bool).tril()
        if mask is None or mask.shape[-2] == 1:
            return mask
        return self.exchange.narrow(mask, mask.dim() - 2)

    def _compute(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        dropout_p: float,
        leading: tuple[int, ...],
        shard_dim: int | None,
        options: dict[str, Any],
    ) -> Tensor:
        """Return attention; with dropout, whose mask is drawn for all queries and heads, by its definition."""
        if not dropout_p:
            return _attention(query, key, value, mask, **options)
        if options.get("enable_gqa"):
            repeats = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
        scale = options["scale"]
        scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        kept = self.draw((*leading, self.length, key.shape[-2]), dropout_p, scores)
        kept = self.exchange.narrow(kept, len(leading) - 1 if shard_dim is not None and shard_dim >= 0 else -2)
        return (scores.softmax(-1) * kept) @ value

    # --- dropout ---

    def drop(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Return the dropout of a shard, by its slice of a mask that is drawn for the whole sequence."""
        if not training or not p:
            return _dropout(input, p, training, inplace)
        dims = [
            dim for dim in (self.dim, *range(input.dim())) if dim < input.dim() and input.shape[dim] == self.own_length
        ]
        if not dims:
            kept = self.draw(tuple(input.shape), p, input)
        else:
            shape = [*input.shape]
            shape[dims[0]] = self.length
            kept = self.exchange.narrow(self.draw(tuple(shape), p, input), dims[0])
        return input.mul_(kept) if inplace else input * kept

    def draw(self, shape: tuple[int, ...], p: float, like: Tensor) -> Tensor:
        """Return a dropout mask, with the numbers that torch draws for a tensor of this shape."""
        if self._make_mask is not None:
            return self._make_mask(shape, p, like)
        # In the order of the memory of ``like``, in which torch draws.
        order = sorted(range(like.dim()), key=lambda dim: (-like.stride(dim), dim)) if len(shape) == like.dim() else []
        if not order:
            return _dropout(like.new_ones(shape), p, True)
        ones = like.new_ones([shape[dim] for dim in order])
        return _dropout(ones.permute([order.index(dim) for dim in range(len(order))]), p, True)


class _SingleRankExchange(SequenceExchange):
    """The exchange of a single rank, which has the whole sequence."""

    def __init__(self) -> None:
        super().__init__(None, 0, 1)  # pyright: ignore[reportArgumentType]

    def all_to_all_dims(self, value: Tensor, sharded_dim: int, gathered_dim: int, number: int, length: int) -> Tensor:
        return value.clone()

    def gathered(self, shard: Tensor, dim: int, length: int) -> Tensor:
        return shard.clone()


_SINGLE_RANK = _SingleRankExchange()


def whole_sequence(length: int, dim: int, make_mask: MakeMask) -> SequenceShard:
    """Return a shard that is the whole sequence, to record how a block uses attention."""
    return SequenceShard(_SINGLE_RANK, length, dim, None, make_mask)


@contextmanager
def replaced_functions() -> Iterator[None]:
    """Replace attention and dropout of `torch.nn.functional` by functions that compute the shard of their thread."""
    plain = F.scaled_dot_product_attention, F.dropout
    has_fast_path = torch.backends.mha.get_fastpath_enabled()

    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Tensor:
        shard = _current.get()
        return (plain[0] if shard is None else shard.attend)(*args, **kwargs)

    def dropout(*args: Any, **kwargs: Any) -> Tensor:
        shard = _current.get()
        return (plain[1] if shard is None else shard.drop)(*args, **kwargs)

    F.scaled_dot_product_attention = scaled_dot_product_attention
    F.dropout = dropout
    torch.backends.mha.set_fastpath_enabled(False)  # a kernel for whole layers, without calls of attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention, F.dropout = plain
        torch.backends.mha.set_fastpath_enabled(has_fast_path)


def _causal(query: Tensor, length: int) -> Tensor:
    return query.new_ones(length, length, dtype=torch.bool).tril()
