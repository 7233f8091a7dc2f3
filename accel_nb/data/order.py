"""Who gets which samples: pure index arithmetic, no torch.

A *batch* here is a list of sample indices, a *group* is the list of batches that make one global batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Share(NamedTuple):
    """What a rank's batch is of the global batch; one is made for each batch, hence a tuple.

    ``num_samples`` is 0 for a filler: one sample read again so that a rank without a share keeps step with the others.
    ``num_repeated`` of the samples, the last ones, are repeats that make all shares equally long: they count in
    training and in ``total_samples``, and not in metrics. ``total_repeated`` is how many all ranks repeat together.
    """

    num_samples: int
    total_samples: int
    is_last: bool
    is_filler: bool
    num_repeated: int = 0
    total_repeated: int = 0

    @property
    def num_valid(self) -> int:
        """How many of the batch's samples, the first ones, no other rank and no earlier batch has."""
        return self.num_samples - self.num_repeated


def share(total: int, world: int, rank: int) -> range:
    """Return the contiguous share of ``range(total)`` that ``rank`` of ``world`` takes.

    Shares differ by at most one; the first ranks take the larger ones.
    """
    small, num_larger = divmod(total, world)
    start = rank * small + min(rank, num_larger)
    return range(start, start + small + (rank < num_larger))


def even_share(total: int, world: int, rank: int, length: int) -> tuple[range, int]:
    """Return the share of ``range(total)`` where each rank takes ``length``, and how many it lacks at its end."""
    start = min(rank * length, total)
    mine = range(start, min(start + length, total))
    return mine, length - len(mine)


def even_length(total: int, world: int, batch_size: int | None, group_size: int) -> int:
    """Return how many samples every rank takes of a group with ``total`` where all take equally many.

    ``batch_size`` is that of the loader: of one rank where ``group_size`` batches make a group, of all where one does.
    Without it, or where a group holds more, it is the group's own samples, divided.
    """
    needed = -(-total // world)
    if batch_size is None:
        return needed
    return max(needed, batch_size if group_size > 1 else -(-batch_size // world))


def num_groups(num_batches: int, world: int, *, drop_short: bool = False) -> int:
    """Return how many global batches ``world`` ranks make of ``num_batches``; the last one may lack batches."""
    return num_batches // world if drop_short else -(-num_batches // world)


def grouped(items: Iterable[T], size: int, *, drop_short: bool = False) -> Iterator[list[T]]:
    """Yield lists of ``size`` consecutive items; the last one may be shorter, or is dropped then."""
    rest = iter(items)
    while group := list(islice(rest, size)):
        if drop_short and len(group) < size:
            return
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
    group: Sequence[Sequence[Any]],
    world: int,
    rank: int,
    *,
    is_last: bool,
    batch_size: int | None = None,
    fill: Sequence[Any] = (),
    even: int | None = None,
) -> tuple[Any, Share]:
    """Return the samples that ``rank`` takes of a global batch, and what they are of it.

    A group with a batch for each rank gives rank r its r-th batch unchanged. A short one (:func:`is_short`; a group of
    one batch is short in any world of more than one) is split evenly. A rank whose share is empty takes the first
    sample as a filler. With ``even`` each rank takes so many of one that is not even; what lacks is repeated from
    ``fill``.
    """
    sizes = [len(batch) for batch in group]
    total = sum(sizes)
    is_usual = not is_short(sizes, world, batch_size) and all(sizes)
    if is_usual and (even is None or len(set(sizes)) == 1):
        return group[rank], Share(sizes[rank], total, is_last, False)
    merged = group[0] if len(group) == 1 else [index for batch in group for index in batch]
    if even is not None and total:
        mine, lacking = even_share(total, world, rank, even)
        own = merged[mine.start : mine.stop]
        if lacking:
            before = max(rank * even - total, 0)  # what the ranks below repeat
            own = [*own, *(fill[(before + number) % len(fill)] for number in range(lacking))]
        return own, Share(even, even * world, is_last, False, lacking, even * world - total)
    mine = share(total, world, rank)
    if not mine and total:
        return merged[:1], Share(0, total, is_last, True)
    return merged[mine.start : mine.stop], Share(len(mine), total, is_last, False)
