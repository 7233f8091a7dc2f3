"""The batches of a loader that is sharded by index, each with its share of the global batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from accel_nb.data.fetch import build_reader
from accel_nb.data.index_distribution import IndexSampler, length_of
from accel_nb.data.prefetch import SharedBatch
from accel_nb.errors import MisuseError


class DrawnIndices:
    """The sampler of rank 0's inner loader, where rank 0 reads for all."""

    def __init__(self, feed: IndexSampler) -> None:
        self._feed = feed

    def __iter__(self) -> Iterator[Any]:
        # The loader may ask twice and use one: nothing happens before the first item.
        yield from self._feed.draw()

    def __len__(self) -> int:
        return self._feed.num_items() or 0


class FetchedBatches(Iterator[SharedBatch]):
    """The batches of this rank's indices, read in this process: what torch's own iterator does, and no more."""

    __slots__ = ("_dataset", "_indices", "_read")

    def __init__(self, feed: IndexSampler, loader: DataLoader[Any]) -> None:
        self._indices = feed.iter_shares()
        self._dataset = loader.dataset
        self._read = build_reader(loader)

    def __next__(self) -> SharedBatch:
        indices, share = next(self._indices)
        try:
            return self._read(indices), share
        except IndexError as error:
            _explain_range(error, indices, self._dataset)
            raise


class MatchedBatches(Iterator[SharedBatch]):
    """The batches of the inner loader, each with the share that its indices were dealt as."""

    __slots__ = ("_feed", "_shares", "_source")

    def __init__(self, source: Iterator[Any], feed: IndexSampler) -> None:
        self._source = source
        self._feed = feed
        self._shares = feed.pending_shares  # None if the loader's own class starts on the first batch only

    def __next__(self) -> SharedBatch:
        if self._shares is None:
            self._feed.pending_shares = None
        try:
            batch = next(self._source)
        except StopIteration:
            raise
        except Exception:
            if self._shares:
                self._shares.popleft()  # the batch that failed; the caller may go on with the next one
            raise
        if self._shares is None:
            self._shares = self._feed.pending_shares
        if not self._shares:
            raise MisuseError("the loader yields more batches than its sampler draws: it cannot be divided by index")
        return batch, self._shares.popleft()


def _explain_range(error: IndexError, indices: Any, dataset: Any) -> None:
    """Raise `MisuseError` if the sampler gave an index that the dataset does not have; else return."""
    length = length_of(dataset)
    outside = [index for index in indices if isinstance(index, int) and not -(length or 0) <= index < (length or 0)]
    if length is not None and outside:
        raise MisuseError(
            f"the sampler gives index {outside[0]}, and the {type(dataset).__name__} has {length} samples, 0 to "
            f"{length - 1}: build the sampler for this dataset, or correct the dataset's __len__"
        ) from error
