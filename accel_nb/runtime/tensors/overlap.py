"""Tensors with internal overlap: several elements at one address, as after `Tensor.expand`.

In-place operations of torch raise an error for these. Elements along a dim of stride 0 are one element in memory, so
writing it once is enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def has_overlap(tensor: Tensor) -> bool:
    """Return whether a dim of the tensor has stride 0."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def without_repeats(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return a view with one element of each dim of stride 0; the tensor itself if there is none.

    If ``like`` is given, a tensor of the same shape, its strides decide.
    """
    for dim, (size, stride) in enumerate(zip(tensor.shape, (tensor if like is None else like).stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def overwrite(target: Tensor, source: Tensor) -> Tensor:
    """Copy a tensor of the same shape into ``target`` in place, and return ``target``."""
    if has_overlap(target):
        without_repeats(target).copy_(without_repeats(source, target))
        return target
    return target.copy_(source)
