"""The batches of a loader that is sharded by index, each with its share of the global batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from accel_nb.data.fetch import build_reader
from accel_nb.data.index_distribution import IndexSampler, length_of
from accel_nb.data.prefetch import BatchAndShare
from accel_nb.errors import MisuseError


class DrawnIndices:
    """The sampler of rank 0's inner loader if rank 0 reads the batches of all ranks."""

    def __init__(self, index_sampler: IndexSampler) -> None:
        self._order = index_sampler

    def __iter__(self) -> Iterator[Any]:
        # The loader may create two iterators and use one, so nothing is drawn before the first item.
        yield from self._order.draw()

    def __len__(self) -> int:
        return self._order.num_items() or 0


class FetchedBatches(Iterator[BatchAndShare]):
    """The batches of this rank's indices, read in this process without the overhead of torch's own iterator."""

    __slots__ = ("_dataset", "_indices", "_read")

    def __init__(self, index_sampler: IndexSampler, loader: DataLoader[Any]) -> None:
        self._indices = index_sampler.iter_shares()
        self._dataset = loader.dataset
        self._read = build_reader(loader)

    def __next__(self) -> BatchAndShare:
        indices, share = next(self._indices)
        try:
            return self._read(indices), share
        except IndexError as error:
            _explain_range(error, indices, self._dataset)
            raise


class MatchedBatches(Iterator[BatchAndShare]):
    """The batches of the inner loader, each with the share that was recorded for its indices."""

    __slots__ = ("_order", "_shares", "_source")

    def __init__(self, source: Iterator[Any], index_sampler: IndexSampler) -> None:
        self._source = source
        self._order = index_sampler
        self._shares = index_sampler.pending_shares  # None if the loader's own class starts on the first batch only

    def __next__(self) -> BatchAndShare:
        if self._shares is None:
            self._order.pending_shares = None
        try:
            batch = next(self._source)
        except StopIteration:
            raise
        except Exception:
            if self._shares:
                self._shares.popleft()  # the batch that failed; the caller may continue with the next one
            raise
        if self._shares is None:
            self._shares = self._order.pending_shares
        if not self._shares:
            raise MisuseError("the loader yields more batches than its sampler draws: it cannot be divided by index")
        return batch, self._shares.popleft()


def _explain_range(error: IndexError, indices: Any, dataset: Any) -> None:
    """Raise `MisuseError` if the sampler yielded an index outside of the dataset; else return."""
    length = length_of(dataset)
    outside = [index for index in indices if isinstance(index, int) and not -(length or 0) <= index < (length or 0)]
    if length is not None and outside:
        raise MisuseError(
            f"the sampler yields index {outside[0]}, and the {type(dataset).__name__} has {length} samples, 0 to "
            f"{length - 1}: build the sampler for this dataset, or correct the dataset's __len__"
        ) from error
