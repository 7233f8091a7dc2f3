"""Tensors of which several elements are one place in memory, such as those that `Tensor.expand` returns.

torch refuses to write into these. What is written into them is equal along the repeated dims, so one element of each
is enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def has_overlap(tensor: Tensor) -> bool:
    """Whether a dim of the tensor repeats one place in memory."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def distinct(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return a view with one element of each dim that repeats one place in memory; the tensor itself without any.

    ``like`` is the tensor whose repeated dims count, of the same shape; by default it is the tensor itself.
    """
    for dim, (size, stride) in enumerate(zip(tensor.shape, (tensor if like is None else like).stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def overwrite(target: Tensor, source: Tensor) -> Tensor:
    """Copy a tensor of the same shape into ``target`` in place, and return that."""
    if has_overlap(target):
        distinct(target).copy_(distinct(source, target))
        return target
    return target.copy_(source)
