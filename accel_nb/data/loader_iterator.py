"""The iterator of a sharded loader whose loop trains."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sized
from typing import Any, Protocol

from accel_nb.data.ending_iterator import EndingIterator
from accel_nb.data.index_distribution import DataShard
from accel_nb.data.loader_observer import LoaderObserver
from accel_nb.data.order import BatchShare
from accel_nb.data.position import EpochProgress
from accel_nb.data.prefetch import BatchAndShare


class _Sharding(Protocol):
    """The attributes of a sharded loader that its iterator uses."""

    observer: LoaderObserver
    shard: DataShard
    latest: BatchShare | None
    on_batch: Callable[[Any, BatchShare], object] | None

    def end_epoch(self, epoch: EpochProgress | None) -> None: ...


class LoaderIterator(EndingIterator):
    """The iterator of a sharded loader: moves each batch to the device, after reporting its share to the observer."""

    __slots__ = ("_epoch", "_move", "_pairs", "_sharding")

    def __init__(
        self,
        loader: Sized,
        pairs: Iterator[BatchAndShare],
        sharding: _Sharding,
        epoch: EpochProgress,
        move: Callable[[Any], Any] | None,
    ) -> None:
        super().__init__(loader)
        self._pairs = pairs
        self._sharding = sharding
        self._epoch = epoch
        self._move = move

    def __next__(self) -> Any:
        sharding = self._sharding
        observer = sharding.observer
        observer.on_batch_end()
        mode = sharding.shard.mode
        if mode.before_next is not None and sharding.latest is not None:
            mode.before_next()
        started, cpu_started = time.perf_counter(), time.thread_time()
        try:
            batch, share = next(self._pairs)
        except StopIteration:
            self.has_ended = True
            sharding.end_epoch(self._epoch)
            if mode.on_end is not None:
                mode.on_end()
            observer.on_share(None)
            raise
        observer.on_read(started, cpu_started)
        sharding.latest = share
        self._epoch.record_batch(share)
        observer.on_share(share)
        if self._move is not None:
            batch = self._move(batch)
        if mode.on_batch is not None:
            mode.on_batch(batch)
        if sharding.on_batch is not None:
            sharding.on_batch(batch, share)
        return batch
