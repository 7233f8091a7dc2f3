"""Collating sequences of different lengths: padded to the longest of the batch, not of the dataset."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from accel_nb.errors import MisuseError

Key = str | int


class PaddingCollate:
    """Collate function that pads sequences along their first dim to the longest in the batch.

    Samples are sequences, or dicts, tuples and lists with fields that are sequences; other values are collated by
    PyTorch's ``default_collate``. A sequence is a tensor or an array with at least one dim, or a list of numbers. A
    batch is a list, tuple or named tuple as its samples are, or a dict for mappings.

    Args:
        pad: The value to pad with, or one for each field by key (position for tuples); other fields are padded with 0.
        multiple_of: Lengths are padded to a multiple of this, which makes some GPU kernels faster.
        mask: Name of a field to add that is 1 where a sample has values and 0 where it is padded: shape (batch,
            length), int64. It belongs to ``mask_of``, or to the first padded field. In tuples it is the last item;
            samples that are single sequences become a pair.
        mask_of: The field that the mask belongs to.
        only: The fields to pad; by default every sequence.
        side: The side to pad.

    Raises `MisuseError` for samples that differ in more than their first dim, or in their fields.
    """

    def __init__(
        self,
        *,
        pad: float | Mapping[Key, float] = 0,
        multiple_of: int = 1,
        mask: str | None = None,
        mask_of: Key | None = None,
        only: Collection[Key] | None = None,
        side: Literal["right", "left"] = "right",
    ) -> None:
        if not isinstance(multiple_of, int) or multiple_of < 1:
            raise MisuseError(f"PaddingCollate(multiple_of={multiple_of!r}): it must be a whole number of at least 1")
        if side not in ("right", "left"):
            raise MisuseError(f"PaddingCollate(side={side!r}): it must be 'right' or 'left'")
        if mask_of is not None and mask is None:
            raise MisuseError(f"PaddingCollate(mask_of={mask_of!r}) has no effect without mask, the name of the mask")
        self._pad = pad
        self._multiple_of = multiple_of
        self._mask = mask
        self._mask_of = mask_of
        self._only = None if only is None else frozenset(only)
        self._side = side

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Return the batch of the samples."""
        first = samples[0]
        if isinstance(first, Mapping):
            return self._mappings(cast("Sequence[Mapping[str, Any]]", samples))
        if isinstance(first, tuple) or (isinstance(first, list) and not _is_sequence(first)):
            return self._tuples(samples)
        if not _is_sequence(first):
            return default_collate(list(samples))
        batch, lengths = self._padded(_column(samples, 0), 0)
        return batch if self._mask is None else (batch, self._mask_from(lengths, batch.shape[1]))

    def _mappings(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        keys = list(samples[0])
        if self._mask in keys:
            raise MisuseError(f"PaddingCollate(mask={self._mask!r}): samples have a field of this name; give another")
        for number, sample in enumerate(samples):
            if set(sample) != set(keys):
                raise MisuseError(
                    f"sample {number} of a batch has the fields {sorted(map(str, sample))}, the first one "
                    f"{sorted(map(str, keys))}: all samples need the same"
                )
        columns = {key: [sample[key] for sample in samples] for key in keys}
        batch, mask = self._fields(columns)
        if self._mask is not None and mask is not None:
            batch[self._mask] = mask
        return batch

    def _tuples(self, samples: Sequence[Sequence[Any]]) -> Any:
        first = samples[0]
        for number, sample in enumerate(samples):
            if len(sample) != len(first):
                raise MisuseError(f"sample {number} of a batch has {len(sample)} items, the first one {len(first)}")
        batch, mask = self._fields({number: [sample[number] for sample in samples] for number in range(len(first))})
        values = [*batch.values(), mask] if self._mask is not None and mask is not None else list(batch.values())
        if isinstance(first, list):
            return values
        make = getattr(first, "_make", None)
        # A named tuple has fixed fields: with a mask, the batch is a plain tuple.
        return make(values) if make is not None and len(values) == len(first) else tuple(values)

    def _fields(self, columns: Mapping[Any, list[Any]]) -> tuple[dict[Any, Any], Tensor | None]:
        """Collate each field; also return the mask if it is requested and a field was a sequence."""
        batch: dict[Any, Any] = {}
        mask: Tensor | None = None
        for key, values in columns.items():
            if not _is_sequence(values[0]) or (self._only is not None and key not in self._only):
                batch[key] = default_collate(values)
                continue
            batch[key], lengths = self._padded(_column(values, key), key)
            if self._mask is not None and mask is None and self._mask_of in (None, key):
                mask = self._mask_from(lengths, batch[key].shape[1])
        if self._mask_of is not None and mask is None:
            raise MisuseError(
                f"PaddingCollate(mask_of={self._mask_of!r}): samples have no such sequence; their fields are "
                f"{', '.join(map(str, columns))}"
            )
        return batch, mask

    def _padded(self, values: list[Tensor], key: Key) -> tuple[Tensor, list[int]]:
        lengths = [value.shape[0] for value in values]
        length = -(-max(lengths) // self._multiple_of) * self._multiple_of
        if min(lengths) == length:
            return torch.stack(values), lengths
        fill = self._pad.get(key, 0) if isinstance(self._pad, Mapping) else self._pad
        is_integral = not (values[0].is_floating_point() or values[0].is_complex())
        if is_integral and not float(fill).is_integer():
            raise MisuseError(
                f"PaddingCollate(pad={fill!r}): field {key!r} has whole numbers; pad it with one, by a dict of pads"
            )
        batch = values[0].new_full((len(values), length, *values[0].shape[1:]), fill)
        for number, value in enumerate(values):
            size = value.shape[0]
            batch[number, slice(size) if self._side == "right" else slice(length - size, length)] = value
        return batch, lengths

    def _mask_from(self, lengths: list[int], length: int) -> Tensor:
        positions = torch.arange(length, device="cpu")
        sizes = torch.tensor(lengths, device="cpu")[:, None]
        return (positions < sizes if self._side == "right" else positions >= length - sizes).long()


def _is_sequence(value: Any) -> bool:
    if isinstance(value, Tensor | np.ndarray):
        return value.ndim > 0
    return isinstance(value, list) and all(type(item) in (int, float, bool) for item in value)


def _column(values: Sequence[Any], key: Key) -> list[Tensor]:
    """Return one field of all samples as tensors that differ in their first dim at most."""
    for number, value in enumerate(values):
        if isinstance(value, list) and not _is_sequence(value):
            raise MisuseError(f"field {key!r} cannot be padded: in sample {number} it has items that are no numbers")
    tensors = [value if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu") for value in values]
    if any(isinstance(value, list) and not value for value in values):  # an empty list has no dtype
        full = next((tensor for tensor in tensors if tensor.numel()), torch.zeros(0, dtype=torch.int64, device="cpu"))
        tensors = [tensor if tensor.numel() else full.new_empty(0) for tensor in tensors]
    kinds = {(tensor.dtype, tuple(tensor.shape[1:]) if tensor.dim() else None) for tensor in tensors}
    if len(kinds) > 1:
        shapes = ", ".join(f"{tuple(item.shape)} {str(item.dtype).removeprefix('torch.')}" for item in tensors[:4])
        raise MisuseError(
            f"field {key!r} cannot be padded: samples may differ in their first dim only, and these are {shapes}"
            + (", ..." if len(tensors) > 4 else "")
        )
    return tensors
