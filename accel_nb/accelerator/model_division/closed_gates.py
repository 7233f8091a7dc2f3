"""Parameters that are almost zero, such as a gate or the scale of a new layer: they hide what they multiply."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

_CLOSED = 1e-2
"""A parameter whose elements are all smaller than this hides differences that later steps show."""


@contextmanager
@torch.no_grad()
def opened_gates(model: nn.Module) -> Iterator[None]:
    """Set parameters that are almost zero to random values inside of the block, the same on all ranks."""
    closed = [parameter for parameter in model.parameters() if _is_closed(parameter)]
    before = [parameter.detach().clone() for parameter in closed]
    generator = torch.Generator().manual_seed(0)
    # Changing `data` does not increase the version counter: an earlier call may have saved the parameter.
    for parameter in closed:
        parameter.data.copy_(torch.rand(parameter.shape, generator=generator, dtype=torch.float32) - 0.5)
    try:
        yield
    finally:
        for parameter, values in zip(closed, before, strict=True):
            parameter.data.copy_(values)


def _is_closed(parameter: nn.Parameter) -> bool:
    values = parameter.data
    if type(values) is not Tensor or values.layout is not torch.strided or values.is_meta:
        return False
    return values.is_floating_point() and values.numel() > 0 and float(values.abs().max()) < _CLOSED
