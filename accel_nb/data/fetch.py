"""Reading of a batch's samples in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate


def build_reader(loader: DataLoader[Any]) -> Callable[[Any], Any]:
    """Return a function that reads and collates the batch of a list of indices, as the loader would.

    Tensors of a ``TensorDataset`` are indexed with all indices at once, which yields the same batch as stacking rows.
    """
    dataset, collate = cast(Any, loader.dataset), loader.collate_fn
    if loader.batch_sampler is None:  # each item of the sampler is one index, even if it is a list
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
        except (TypeError, ValueError, RuntimeError):  # not a list of integers: index the dataset itself
            return by_item(indices)
        if rows.dtype != torch.int64 or rows.dim() != 1:
            return by_item(indices)
        return [tensor[rows] for tensor in tensors]

    return by_column


def _rows_of(dataset: Any) -> Sequence[Tensor] | None:
    """Return the tensors whose rows are the dataset's samples; None if its samples are not rows of tensors."""
    inner = dataset.dataset if type(dataset) is Subset else dataset
    if type(inner) is not TensorDataset:
        return None
    # For other layouts and subclasses of Tensor, indexing might differ from stacking.
    is_plain = all(type(tensor) is Tensor and tensor.is_contiguous() and tensor.dim() for tensor in inner.tensors)
    return inner.tensors if is_plain else None
