"""Parameters and buffers that are almost zero, such as a gate or a weight that grows: they hide what they multiply."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

_CLOSED = 1e-2
"""A tensor whose elements are all smaller than this hides differences that later steps show."""


@contextmanager
@torch.no_grad()
def opened_gates(model: nn.Module) -> Iterator[None]:
    """Set parameters and buffers that are almost zero to random values inside of the block, the same on all ranks.

    Buffers get positive ones, since they may be variances or counts.
    """
    closed = [tensor for tensor in (*model.parameters(), *model.buffers()) if _is_closed(tensor)]
    before = [tensor.detach().clone() for tensor in closed]
    generator = torch.Generator().manual_seed(0)
    # Changing `data` does not increase the version counter: an earlier call may have saved the tensor.
    for tensor in closed:
        values = torch.rand(tensor.shape, generator=generator, dtype=torch.float32, device="cpu")
        tensor.data.copy_(values - 0.5 if isinstance(tensor, nn.Parameter) else values)
    try:
        yield
    finally:
        for tensor, values in zip(closed, before, strict=True):
            tensor.data.copy_(values)


def _is_closed(tensor: Tensor) -> bool:
    values = tensor.data
    if type(values) is not Tensor or values.layout is not torch.strided or values.is_meta:
        return False
    return values.is_floating_point() and values.numel() > 0 and float(values.abs().max()) < _CLOSED
