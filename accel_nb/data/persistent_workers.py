"""The worker processes of a loader with ``persistent_workers``, which all its iterations use in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader


def iterate_in_turn(
    loader: DataLoader[Any], other: DataLoader[Any] | None, start: Callable[[DataLoader[Any]], Iterator[Any]]
) -> Iterator[Any]:
    """Return ``start(loader)``, an iterator that uses the persistent workers of ``other`` if there are any.

    A loader draws a seed for its workers when it starts them, and ends its last iteration when a new one begins. The
    two loaders read the same data, each in its own order.
    """
    if other is None or not loader.persistent_workers:
        return start(loader)
    iterator: Any = loader._iterator if other._iterator is None else other._iterator
    if iterator is not None:
        if hasattr(iterator, "_index_sampler"):  # else its processes run in the notebook
            iterator._index_sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        loader.__dict__["_iterator"] = iterator
    source = start(loader)
    other.__dict__["_iterator"] = loader._iterator
    return source
