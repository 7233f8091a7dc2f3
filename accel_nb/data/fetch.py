"""Reading the samples of a batch in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate


def reader(loader: DataLoader[Any]) -> Callable[[Any], Any]:
    """Return the function that makes a batch of a list of indices, as the loader would.

    Tensors that lie ready in a ``TensorDataset`` are indexed as a whole, which gives the same batch as stacking their
    rows one by one.
    """
    dataset, collate = cast(Any, loader.dataset), loader.collate_fn
    if loader.batch_sampler is None:  # what the sampler gives is one index, though it may be a list
        return lambda index: collate(dataset[index])
    read_many = getattr(dataset, "__getitems__", None)

    def by_item(indices: Sequence[Any]) -> Any:
        return collate(read_many(indices) if read_many else [dataset[index] for index in indices])

    tensors = _rows_of(dataset) if collate is default_collate else None
    return by_item if tensors is None else _by_column(dataset, tensors, by_item)


def _by_column(
    dataset: Any, tensors: Sequence[Tensor], by_item: Callable[[Sequence[Any]], Any]
) -> Callable[[Sequence[Any]], Any]:
    places = dataset.indices if type(dataset) is Subset else None

    def by_column(indices: Sequence[Any]) -> Any:
        try:
            rows = torch.from_numpy(np.asarray(indices if places is None else [places[index] for index in indices]))
        except (TypeError, ValueError, RuntimeError):  # no list of whole numbers: the dataset says what it makes of it
            return by_item(indices)
        if rows.dtype != torch.int64 or rows.dim() != 1:
            return by_item(indices)
        return [tensor[rows] for tensor in tensors]

    return by_column


def _rows_of(dataset: Any) -> Sequence[Tensor] | None:
    """Return the tensors whose rows are the dataset's samples; None if they are not all there is to a sample."""
    inner = dataset.dataset if type(dataset) is Subset else dataset
    if type(inner) is not TensorDataset:
        return None
    # What is laid out otherwise, or more than a tensor, might come out of the two ways differently.
    is_plain = all(type(tensor) is Tensor and tensor.is_contiguous() and tensor.dim() for tensor in inner.tensors)
    return inner.tensors if is_plain else None
