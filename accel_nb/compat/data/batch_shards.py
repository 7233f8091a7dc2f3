"""Division of batch samplers and iterable datasets among processes, as in accelerate.

These classes are for libraries that divide data themselves. `Accelerator.prepare` uses `accel_nb.data`, which also
weights uneven shares.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle, islice
from typing import Any

from torch.utils.data import BatchSampler, IterableDataset


class BatchSamplerShard(BatchSampler):
    """The batches of one process: every n-th batch, or with ``split_batches`` its part of every batch.

    Args:
        batch_sampler: Yields lists of indices. Without ``batch_size`` its batches may have any size.
        num_processes: The number of processes.
        process_index: The index of this process.
        split_batches: Divide each batch among the processes.
        even_batches: Complete the last batches with samples of the first, so that all processes have equally many.
    """

    def __init__(
        self,
        batch_sampler: Any,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        self.batch_size: Any = getattr(batch_sampler, "batch_size", None)
        if split_batches and (self.batch_size is None or self.batch_size % num_processes):
            raise ValueError(
                f"split_batches=True divides each batch among {num_processes} processes: its batch_size, which is "
                f"{self.batch_size}, must be a multiple of that"
            )
        self.batch_sampler = batch_sampler
        self.num_processes, self.process_index = num_processes, process_index
        self.split_batches, self.even_batches = split_batches, even_batches
        self.drop_last: bool = getattr(batch_sampler, "drop_last", False)

    @property
    def total_length(self) -> int:
        """The number of batches of all processes."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        if self.split_batches:
            return len(self.batch_sampler)
        rounds, rest = divmod(len(self.batch_sampler), self.num_processes)
        if self.drop_last or not rest:
            return rounds
        return rounds + int(self.even_batches or self.process_index < rest)

    def __iter__(self) -> Iterator[list[Any]]:
        return self._parts() if self.split_batches else self._whole_batches()

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch to the batch sampler, or its sampler."""
        set_epoch_of(self.batch_sampler, epoch)

    def _parts(self) -> Iterator[list[Any]]:
        """Yield this process's part of each batch."""
        part = self.batch_size // self.num_processes
        own = slice(part * self.process_index, part * (self.process_index + 1))
        first: Any = None
        for batch in self.batch_sampler:
            first = batch if first is None else first
            if len(batch) < self.batch_size:
                if self.drop_last:
                    continue
                batch = _fill(batch, first, self.batch_size) if self.even_batches else batch
            if len(batch[own]):
                yield list(batch[own])

    def _whole_batches(self) -> Iterator[list[Any]]:
        """Yield every ``num_processes``-th batch; batches are read in rounds of one for each process."""
        batches, first = iter(self.batch_sampler), None
        while round_batches := list(islice(batches, self.num_processes)):
            first = first or round_batches
            is_complete = len(round_batches) == self.num_processes and len(round_batches[-1]) == (
                self.batch_size or len(round_batches[-1])
            )
            if not is_complete:
                if self.drop_last:
                    return
                round_batches = self._complete_round(round_batches, first) if self.even_batches else round_batches
            if self.process_index < len(round_batches):
                yield list(round_batches[self.process_index])

    def _complete_round(
        self, round_batches: Sequence[Sequence[Any]], first: Sequence[Sequence[Any]]
    ) -> Sequence[Sequence[Any]]:
        """Complete the last round from the first one: by batches if there is no batch size, else by samples."""
        if self.batch_size is None:
            return _fill(round_batches, first, self.num_processes)
        samples = _fill(_concatenate(round_batches), _concatenate(first), self.batch_size * self.num_processes)
        return [samples[at : at + self.batch_size] for at in range(0, len(samples), self.batch_size)]


class IterableDatasetShard(IterableDataset[Any]):
    """The samples of one process: every n-th batch, or with ``split_batches`` its part of every batch.

    Every process reads all samples. An incomplete last batch is dropped, or completed with the first samples.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        if split_batches and batch_size > 1 and batch_size % num_processes:
            raise ValueError(
                f"split_batches=True divides each batch among {num_processes} processes: its batch_size, which is "
                f"{batch_size}, must be a multiple of that"
            )
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, drop_last
        self.num_processes, self.process_index, self.split_batches = num_processes, process_index, split_batches
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch to the dataset."""
        self.epoch = epoch
        set_epoch_of(self.dataset, epoch)

    def __len__(self) -> int:
        total: int = len(self.dataset)  # pyright: ignore[reportArgumentType]
        round_size, own = self._sizes()
        return (total // round_size if self.drop_last else -(-total // round_size)) * own

    def _sizes(self) -> tuple[int, int]:
        """Return the number of samples of one round of all processes, and of this process in it."""
        if self.split_batches:
            return self.batch_size, self.batch_size // self.num_processes
        return self.batch_size * self.num_processes, self.batch_size

    def __iter__(self) -> Iterator[Any]:
        generator: Any = getattr(self.dataset, "generator", None)
        if not hasattr(self.dataset, "set_epoch") and hasattr(generator, "manual_seed"):
            generator.manual_seed(self.epoch)  # so that every process has the same order
        round_size, own = self._sizes()
        own_slice = slice(own * self.process_index, own * (self.process_index + 1))
        samples, first = iter(self.dataset), None
        while batch := list(islice(samples, round_size)):
            first = first or batch
            if len(batch) < round_size:
                if self.drop_last:
                    return
                batch = _fill(batch, first, round_size)
            yield from batch[own_slice]


def set_epoch_of(sampler: Any, epoch: int) -> None:
    """Call ``set_epoch`` of a batch sampler, sampler or dataset, and of the samplers in it, where there is one."""
    for _ in range(8):  # samplers nested more deeply do not occur; a cycle of them must end
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        inner = getattr(sampler, "batch_sampler", None)
        sampler = getattr(sampler, "sampler", None) if inner is None else inner
        if sampler is None:
            return


def _fill(items: Sequence[Any], source: Sequence[Any], size: int) -> list[Any]:
    return [*items, *islice(cycle(source), size - len(items))]


def _concatenate(batches: Sequence[Sequence[Any]]) -> list[Any]:
    return [index for batch in batches for index in batch]
