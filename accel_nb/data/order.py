"""Who gets which samples: pure index arithmetic, no torch.

A *batch* here is a list of sample indices, a *group* is the list of batches that make one global batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank's batch is of the global batch.

    ``num_samples`` is 0 for a filler: one sample read again so that a rank without a share keeps step with the others.
    """

    num_samples: int
    total_samples: int
    is_last: bool
    is_filler: bool


def share(total: int, world: int, rank: int) -> range:
    """Return the contiguous share of ``range(total)`` that ``rank`` of ``world`` takes.

    Shares differ by at most one; the first ranks take the larger ones.
    """
    small, num_larger = divmod(total, world)
    start = rank * small + min(rank, num_larger)
    return range(start, start + small + (rank < num_larger))


def num_groups(num_batches: int, world: int) -> int:
    """Return how many global batches ``world`` ranks make of ``num_batches``, the last one maybe short."""
    return -(-num_batches // world)


def grouped(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield lists of ``size`` consecutive items; the last one may be shorter."""
    rest = iter(items)
    while group := list(islice(rest, size)):
        yield group


def mark_last(items: Iterable[T], expected: int | None) -> Iterator[tuple[T, bool]]:
    """Yield each item and whether it is the last one.

    Of the first ``expected - 1`` items none is taken for the last, so none is drawn ahead of its time; from there on,
    or from the start without ``expected``, the next item is drawn before one is given out. When there are fewer than
    expected, no item is marked.
    """
    rest = iter(items)
    yield from ((item, False) for item in islice(rest, max((expected or 1) - 1, 0)))
    for item in rest:
        current = item
        for following in rest:
            yield current, False
            current = following
        yield current, True


def is_short(sizes: Sequence[int], world: int, batch_size: int | None) -> bool:
    """Whether a group has less than a batch for each rank: too few batches, or samples missing from a fixed size."""
    return len(sizes) < world or (batch_size is not None and sum(sizes) < world * batch_size)


def deal(
    group: Sequence[Sequence[Any]], world: int, rank: int, *, is_last: bool, batch_size: int | None = None
) -> tuple[Any, Share]:
    """Return the samples that ``rank`` takes of a global batch, and what they are of it.

    A group with a batch for each rank gives rank r its r-th batch unchanged. A short one (:func:`is_short`; a group of
    one batch is short in any world of more than one) is split evenly. A rank whose share is empty takes the first
    sample as a filler.
    """
    sizes = [len(batch) for batch in group]
    total = sum(sizes)
    if not is_short(sizes, world, batch_size) and all(sizes):
        return group[rank], Share(sizes[rank], total, is_last, False)
    merged = group[0] if len(group) == 1 else [index for batch in group for index in batch]
    mine = share(total, world, rank)
    if not mine and total:
        return merged[:1], Share(0, total, is_last, True)
    return merged[mine.start : mine.stop], Share(len(mine), total, is_last, False)
