"""Whole batches that the ``__iter__`` of a loader's class reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accel_nb.data.prefetch import BatchAndShare
from accel_nb.data.streams import BatchDivider


class CustomIteration(Iterator[BatchAndShare]):
    """The batches of ``source``, each with the share ``index``; that with the number ``num_batches`` is the last one.

    After an error of the source the next call continues, as it does without this class.
    """

    __slots__ = ("_divider", "_index", "_num_batches", "_number", "_source")

    def __init__(self, source: Iterator[Any], divider: BatchDivider, num_batches: int | None, index: int) -> None:
        self._source = source
        self._divider = divider
        self._num_batches = num_batches
        self._number = 0
        self._index = index

    def __next__(self) -> BatchAndShare:
        batch = next(self._source)
        self._number += 1
        return self._divider.divide([batch], self._number == self._num_batches, [self._index]).pop()
