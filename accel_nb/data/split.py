"""Division of plain inputs among ranks, without a loader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accel_nb.data.order import contiguous_share
from accel_nb.errors import MisuseError


def split_inputs(inputs: Any, rank: int, size: int, *, pad: bool = False) -> Any:
    """Return the contiguous part of ``inputs`` for ``rank`` of ``size``; ``inputs`` is not changed.

    Each value of a mapping is divided in the same way, so they must be equally long. Parts differ by at most one item,
    and may be empty; with ``pad`` the last item of ``inputs`` is repeated until parts are equally long. Raises
    `MisuseError` for inputs without a length or slicing, and for padding of an unknown type.
    """
    if isinstance(inputs, Mapping):
        lengths = {key: _length(value) for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise MisuseError(
                f"each value of a dict is divided in the same way, so they must be equally long: {lengths}"
            )
        return {key: split_inputs(value, rank, size, pad=pad) for key, value in inputs.items()}
    if isinstance(inputs, range) and pad:
        return split_inputs(list(inputs), rank, size, pad=True)
    length = _length(inputs)
    own_range = contiguous_share(length, size, rank)
    missing = -(-length // size) - len(own_range) if pad and length else 0
    if is_dataset(inputs):  # its slices are dicts
        dataset: Any = inputs
        return dataset.select([*own_range, *[length - 1] * missing])
    try:
        part = inputs[own_range.start : own_range.stop]
    except (TypeError, KeyError) as error:
        raise _refusal(inputs) from error
    if not pad or length % size == 0:
        return part
    # Ranks that need no padding try it too, so that a value that cannot be padded is refused on every rank.
    padded = _with_last(part if missing else part[:0], inputs[length - 1 :])
    return padded if missing else part


def is_dataset(inputs: Any) -> bool:
    """Return whether an object is a `datasets.Dataset`, without an import of the package."""
    return any(
        (kind.__module__, kind.__qualname__) == ("datasets.arrow_dataset", "Dataset") for kind in type(inputs).__mro__
    )


def _length(inputs: Any) -> int:
    if isinstance(inputs, Tensor | np.ndarray) and inputs.ndim == 0:
        raise MisuseError("a scalar cannot be divided among ranks; give a tensor with a first dim")
    try:
        return len(inputs)
    except TypeError as error:
        raise _refusal(inputs) from error


def _with_last(part: Any, last: Any) -> Any:
    if isinstance(part, Tensor):
        return torch.cat([part, last])
    if isinstance(part, np.ndarray):
        return np.concatenate([part, last])
    if isinstance(part, Sequence):
        with suppress(TypeError):  # some sequences cannot be joined
            joined: Any = part
            return joined + last
    raise MisuseError(
        f"a {type(part).__name__} cannot be padded; give a list, tuple, tensor or array, or leave apply_padding out"
    )


def _refusal(inputs: Any) -> MisuseError:
    return MisuseError(
        f"a {type(inputs).__name__} cannot be divided among ranks; give a list, tuple, tensor, array, or a dict of them"
    )
