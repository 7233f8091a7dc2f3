"""The iterator of a sharded loader that every rank reads whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sized
from typing import Any

from accel_nb.data.ending_iterator import EndingIterator
from accel_nb.data.loader_observer import LoaderObserver
from accel_nb.runtime.tensors.nested import first_batch_size


class WholeIterator(EndingIterator):
    """The iterator of a loader that every rank reads whole; observers may detect its end by a weak reference."""

    __slots__ = ("__weakref__", "_move", "_observer", "_source")

    def __init__(
        self, loader: Sized, source: Iterator[Any], observer: LoaderObserver, move: Callable[[Any], Any] | None
    ) -> None:
        super().__init__(loader)
        self._source = source
        self._observer = observer
        self._move = move

    def __next__(self) -> Any:
        started, cpu_started = time.perf_counter(), time.thread_time()
        try:
            batch = next(self._source)
        except StopIteration:
            self.has_ended = True
            self._observer.on_whole_batch(None, None)
            raise
        self._observer.on_read(started, cpu_started)
        self._observer.on_whole_batch(self, first_batch_size(batch))
        return batch if self._move is None else self._move(batch)
