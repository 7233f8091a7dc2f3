"""Division of a global batch among ranks: index arithmetic without torch.

A *batch* here is a list of sample indices. A *global batch* is the list of the loader's batches that all ranks train on
in one step: one batch that is divided, or one for each rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class BatchShare(NamedTuple):
    """A rank's share of a global batch; a tuple, since one is created for each batch.

    ``num_samples`` is 0 for a filler: one repeated sample, with which a rank without a share joins the step. The last
    ``num_repeated`` samples are repeats that make all shares equally long: they count in training and in
    ``total_samples``, but not in metrics. ``total_repeated`` is the number of repeats on all ranks. If the share
    ``is_whole``, the rank has read all samples of the batch, and ``num_samples`` is the number that its models compute.
    """

    num_samples: int
    total_samples: int
    is_last: bool
    is_filler: bool
    num_repeated: int = 0
    total_repeated: int = 0
    is_whole: bool = False

    @property
    def num_valid(self) -> int:
        """The number of samples, the first ones, that are not repeats."""
        return self.num_samples - self.num_repeated


def contiguous_share(total: int, world: int, rank: int) -> range:
    """Return the contiguous share of ``range(total)`` for ``rank`` of ``world``.

    Shares differ by at most one; the first ranks have the larger ones.
    """
    small, num_larger = divmod(total, world)
    start = rank * small + min(rank, num_larger)
    return range(start, start + small + (rank < num_larger))


def whole_batch_share(total: int, world: int, rank: int, *, is_last: bool) -> BatchShare:
    """Return the share of a rank that reads all ``total`` samples of a batch."""
    return BatchShare(len(contiguous_share(total, world, rank)), total, is_last, False, is_whole=True)


def even_share(total: int, world: int, rank: int, length: int) -> tuple[range, int]:
    """Return this rank's share of ``range(total)`` if each rank has ``length`` samples, and how many it lacks."""
    start = min(rank * length, total)
    own_range = range(start, min(start + length, total))
    return own_range, length - len(own_range)


def even_length(total: int, world: int, batch_size: int | None, batches_per_global_batch: int) -> int:
    """Return the number of samples per rank of a global batch of ``total`` samples if all ranks have equally many.

    ``batch_size`` is the loader's: the size of one rank's batch if ``batches_per_global_batch`` is above 1, else of the
    batch of all ranks together. Without it, or if there are more samples, the samples are divided, rounded up.
    """
    needed = -(-total // world)
    if batch_size is None:
        return needed
    return max(needed, batch_size if batches_per_global_batch > 1 else -(-batch_size // world))


def num_global_batches(num_batches: int, world: int, *, drop_short: bool = False) -> int:
    """Return the number of global batches for ``num_batches`` on ``world`` ranks; the last may be incomplete."""
    return num_batches // world if drop_short else -(-num_batches // world)


def grouped(items: Iterable[T], size: int, *, drop_short: bool = False) -> Iterator[list[T]]:
    """Yield lists of ``size`` consecutive items; the last may be shorter, or is dropped with ``drop_short``."""
    rest = iter(items)
    while group := list(islice(rest, size)):
        if drop_short and len(group) < size:
            return
        yield group


def flag_last(
    items: Iterable[T], expected: int | None, *, is_exact: bool = False, reads_ahead: bool = True
) -> Iterator[tuple[T, bool]]:
    """Yield each item and whether it is the last one.

    If the number ``expected`` is exact, or nothing is read ahead, the items are drawn one by one, as by a loop over
    them: drawing the next one, or the end of a sampler, may advance a random generator. The last item is then found by
    its number; without ``expected`` none is marked.

    The first ``expected - 1`` items are not the last, so they are yielded without drawing the next one. After these, or
    without ``expected``, the next item is drawn before one is yielded. With fewer items than expected, no item is
    marked.
    """
    rest = iter(items)
    if not reads_ahead or (is_exact and expected is not None):
        yield from ((item, expected is not None and number >= expected) for number, item in enumerate(rest, 1))
        return
    yield from ((item, False) for item in islice(rest, max((expected or 1) - 1, 0)))
    for item in rest:
        current = item
        for following in rest:
            yield current, False
            current = following
        yield current, True


def is_short(sizes: Sequence[int], world: int, batch_size: int | None) -> bool:
    """Return whether a global batch has less than a full batch for each rank: too few batches, or too few samples."""
    return len(sizes) < world or (batch_size is not None and sum(sizes) < world * batch_size)


def distribute_indices(
    batches: Sequence[Sequence[Any]],
    world: int,
    rank: int,
    *,
    is_last: bool,
    batch_size: int | None = None,
    repeats: Sequence[Any] = (),
    num_even: int | None = None,
) -> tuple[Any, BatchShare]:
    """Return ``rank``'s samples of a global batch, and its `BatchShare`.

    ``batches`` are the batches of one global batch. If there is one for each rank, rank r has the r-th batch unchanged.
    Otherwise (`is_short`; a single batch is short in any world of more than one) the samples are divided evenly. A rank
    without samples gets the first one as a filler. With ``num_even``, each rank has that many samples of a global batch
    that does not divide evenly; missing ones are taken from ``repeats``.
    """
    sizes = [len(batch) for batch in batches]
    total = sum(sizes)
    is_full = not is_short(sizes, world, batch_size) and all(sizes)
    if is_full and (num_even is None or len(set(sizes)) == 1):
        return batches[rank], BatchShare(sizes[rank], total, is_last, False)
    merged = batches[0] if len(batches) == 1 else [index for batch in batches for index in batch]
    if num_even is not None and total:
        own_range, lacking = even_share(total, world, rank, num_even)
        own = merged[own_range.start : own_range.stop]
        if lacking:
            before = max(rank * num_even - total, 0)  # repeats of the lower ranks
            own = [*own, *(repeats[(before + number) % len(repeats)] for number in range(lacking))]
        return own, BatchShare(num_even, num_even * world, is_last, False, lacking, num_even * world - total)
    own_range = contiguous_share(total, world, rank)
    if not own_range and total:
        return merged[:1], BatchShare(0, total, is_last, True)
    return merged[own_range.start : own_range.stop], BatchShare(len(own_range), total, is_last, False)
