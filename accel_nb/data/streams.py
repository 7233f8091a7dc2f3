"""Division of collated batches: of iterable datasets, and of datasets that yield whole batches.

Three ways to read them:

- *whole*: every rank reads each batch, and uses its share of it.
- *dispatched*: rank 0 reads, and sends each rank its share (`accel_nb.data.dispatch`).
- *own shards*: the dataset divides itself (``shard(num_shards=, index=)``), each rank reads its own shard, and in each
  step the ranks exchange the sizes of their batches. The order differs from the order in one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from accel_nb.data.index_distribution import DataShard, warn_if_short
from accel_nb.data.order import (
    BatchShare,
    contiguous_share,
    even_length,
    even_share,
    flag_last,
    grouped,
    is_short,
    whole_batch_share,
)
from accel_nb.data.prefetch import BatchAndShare
from accel_nb.errors import MisuseError
from accel_nb.runtime.tensors.nested import concat_batches, first_batch_size, slice_batch

_END = object()


class BatchDivider:
    """Divides the collated batches of each global batch into the shares of all ranks; one instance per epoch.

    If all ranks are to have equally many samples, repeats fill up an incomplete global batch; without ``fills_batches``
    only until the number of samples can be divided by the number of ranks.
    """

    def __init__(self, shard: DataShard, batch_size: int | None, *, fills_batches: bool = True) -> None:
        self._shard = shard
        self._batch_size = batch_size
        self._filled_size = batch_size if fills_batches else None
        # The epoch's first samples, repeated to give all ranks equally many.
        self._first: Any = None

    def divide(self, batches: Sequence[Any], is_last: bool, indices: Sequence[int]) -> list[BatchAndShare]:
        """Return the shares with these ``indices`` of one global batch, given as the list of its batches."""
        shard = self._shard
        found = [first_batch_size(batch) for batch in batches]
        sizes = [1 if number is None else number for number in found]
        if shard.mode.is_whole:
            return [self._whole(batches, sizes, is_last, index) for index in indices]
        limit = self._batch_size if shard.batches_per_global_batch > 1 else None
        whole = None
        if shard.is_even and self._first is None and None not in found:
            whole = self._first = self._joined_or_raise(batches)
        is_full = not is_short(sizes, shard.count, limit) and all(sizes)
        if is_full and not (shard.is_even and len(set(sizes)) > 1):
            total = sum(sizes)
            return [(batches[index], BatchShare(sizes[index], total, is_last, False)) for index in indices]
        if whole is None and None not in found:
            whole = self._joined_or_raise(batches) if shard.is_even else _join_or_none(batches)
        if whole is None:
            return [_whole_batch(batches, sizes, is_last, index) for index in indices]
        even = (
            even_length(sum(sizes), shard.count, self._filled_size, shard.batches_per_global_batch)
            if shard.is_even
            else None
        )
        return [self._slice(whole, sum(sizes), even, is_last, index) for index in indices]

    def _whole(self, batches: Sequence[Any], sizes: Sequence[int], is_last: bool, index: int) -> BatchAndShare:
        batch = batches[0] if len(batches) == 1 else self._joined_or_raise(batches)
        return batch, whole_batch_share(sum(sizes), self._shard.count, index, is_last=is_last)

    def _slice(self, whole: Any, total: int, even: int | None, is_last: bool, index: int) -> BatchAndShare:
        count = self._shard.count
        if even is not None and total:
            own_range, lacking = even_share(total, count, index, even)
            parts = [slice_batch(whole, own_range.start, own_range.stop)] if own_range else []
            parts += self._repeats(max(index * even - total, 0), lacking)
            return concat_batches(parts), BatchShare(even, even * count, is_last, False, lacking, even * count - total)
        own_range = contiguous_share(total, count, index)
        if not own_range and total:
            return slice_batch(whole, 0, 1), BatchShare(0, total, is_last, True)
        return slice_batch(whole, own_range.start, own_range.stop), BatchShare(len(own_range), total, is_last, False)

    def _repeats(self, start: int, length: int) -> list[Any]:
        """Return slices with ``length`` of the first samples, from number ``start`` on, cyclically."""
        size = first_batch_size(self._first) or 1
        parts: list[Any] = []
        while length > 0:
            at = start % size
            taken = min(length, size - at)
            parts.append(slice_batch(self._first, at, at + taken))
            start, length = start + taken, length - taken
        return parts

    def _joined_or_raise(self, batches: Sequence[Any]) -> Any:
        whole = _join_or_none(batches)
        if whole is None:
            raise MisuseError(
                "even_batches fills up the last batches with the first samples, and the batches of this loader cannot "
                "be joined, since they differ in shape or structure: set even_batches to False, or use a collate_fn "
                "whose batches have the same shape"
            )
        return whole


def read_everywhere(
    source: Iterator[Any], expected: int | None, shard: DataShard, divider: BatchDivider, drop_last: bool
) -> Iterator[BatchAndShare]:
    """Yield this rank's share of each global batch; every rank reads the same batches."""
    is_last = False
    groups = grouped(source, shard.batches_per_global_batch, drop_short=shard.drops_incomplete(drop_last))
    for batches, is_last in flag_last(groups, expected, reads_ahead=shard.mode.reads_ahead):
        pair = divider.divide(batches, is_last, [shard.index])
        batches.clear()  # frees the batches while the share is trained on
        yield pair.pop()
    warn_if_short(expected, is_last)


def read_own_shard(source: Iterator[Any], shard: DataShard) -> Iterator[BatchAndShare]:
    """Yield this rank's own batches in as many steps as the longest rank has; one small message per step.

    A rank without further batches yields fillers, the first sample of its last batch.
    """
    filler: Any = None
    batch = next(source, _END)
    while True:
        ahead = _END if batch is _END else next(source, _END)
        size = 0 if batch is _END else first_batch_size(batch)
        counts, has_more = _exchange_sizes(shard, 1 if size is None else size, ahead is not _END)
        if not sum(counts) and not has_more:
            return
        if batch is not _END and ahead is _END:
            filler = slice_batch(batch, 0, 1)
        if batch is _END and filler is None:
            raise MisuseError(
                "this rank's shard of the dataset has no sample, while those of other ranks have: each shard of the "
                "dataset must hold at least one sample, or set dispatch_batches to True"
            )
        pair = [_make_share(filler if batch is _END else batch, counts[shard.index], counts, not has_more)]
        batch = ahead
        yield pair.pop()


def _make_share(batch: Any, size: int, counts: list[int], is_last: bool) -> BatchAndShare:
    """Return a batch with its share; as accelerate does, no sample of a rank's own shard is repeated to fill it."""
    if size:
        return batch, BatchShare(size, sum(counts), is_last, False)
    return slice_batch(batch, 0, 1), BatchShare(0, sum(counts), is_last, True)


def _exchange_sizes(shard: DataShard, size: int, has_more: bool) -> tuple[list[int], bool]:
    """Exchange the number of samples of each share in this step, and whether any rank has further batches."""
    rows = [row.tolist() for row in shard.comm.all_gather(torch.tensor([shard.index, size, has_more], device="cpu"))]
    counts = {index: size for index, size, _ in rows}  # equal on the ranks of one model replica
    return [counts[index] for index in sorted(counts)], any(more for _, _, more in rows)


def _join_or_none(batches: Sequence[Any]) -> Any | None:
    try:
        return concat_batches(batches)
    except ValueError:
        return None


def _whole_batch(batches: Sequence[Any], sizes: list[int], is_last: bool, index: int) -> BatchAndShare:
    """Return a share of batches that cannot be sliced or joined: whole batches for the first ranks, then fillers."""
    total = sum(sizes)
    if index < len(batches) and sizes[index]:
        return batches[index], BatchShare(sizes[index], total, is_last, False)
    return slice_batch(batches[0], 0, 1), BatchShare(0, total, is_last, True)
