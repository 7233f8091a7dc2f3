"""Replacement of almost zero parameters and buffers by random values, while model division tests a model.

The test compares the forward passes of whole batches and of their parts, to find dependences between samples. A branch
that is multiplied by zeros, by a gate or by the matrix B of LoRA, contributes nothing: a dependence inside of it would
be missed until training has changed the zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

_NEAR_ZERO = 1e-2
"""A tensor is almost zero if all of its elements are smaller than this in absolute value."""


@contextmanager
@torch.no_grad()
def randomize_near_zero(model: nn.Module) -> Iterator[None]:
    """Set parameters and buffers that are almost zero to random values inside of the block, the same on all ranks.

    Buffers get positive ones, since they may be variances or counts.
    """
    near_zero = [tensor for tensor in (*model.parameters(), *model.buffers()) if _is_near_zero(tensor)]
    before = [tensor.detach().clone() for tensor in near_zero]
    generator = torch.Generator().manual_seed(0)
    try:
        # Changing `data` does not increase the version counter: an earlier call may have saved the tensor.
        for tensor in near_zero:
            values = torch.rand(tensor.shape, generator=generator, dtype=torch.float32, device="cpu")
            tensor.data.copy_(values - 0.5 if isinstance(tensor, nn.Parameter) else values)
        yield
    finally:
        for tensor, values in zip(near_zero, before, strict=True):
            tensor.data.copy_(values)


def _is_near_zero(tensor: Tensor) -> bool:
    values = tensor.data
    if type(values) is not Tensor or values.layout is not torch.strided or values.is_meta:
        return False
    if not values.is_floating_point() or not values.numel() or _is_expanded(values):
        return False
    if values.element_size() == 1:  # float8, for which torch has no `abs`
        values = values.float()
    return float(values.abs().max()) < _NEAR_ZERO


def _is_expanded(tensor: Tensor) -> bool:
    """Return whether elements of a tensor share memory, as after ``expand``; torch does not copy to such tensors."""
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
