"""Restoration of a model's attributes and buffers after calls that are made for a check."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def restoring(model: nn.Module) -> Iterator[None]:
    """Restore attributes and buffers of a model's modules that calls in the block have changed, when it ends."""
    modules = list(model.modules())
    held = [(names, dict(names)) for part in modules for names in (vars(part), part._buffers)]
    buffers = list(zip(model.buffers(), copy_buffers(model), strict=True))
    try:
        yield
    finally:
        for names, before in held:
            for name in names.keys() - before.keys():
                del names[name]
            for name, value in before.items():
                if names.get(name) is not value:
                    names[name] = value
        for value, copied in buffers:
            value.data.copy_(copied)  # by `data`, which keeps the version: an earlier call may have saved the buffer


def copy_buffers(model: nn.Module) -> list[Tensor]:
    """Return copies of the buffers of a model: batch normalization does not count its writes to them."""
    return [value.detach().clone() for value in model.buffers()]


def have_changed(model: nn.Module, copies: Sequence[Tensor]) -> bool:
    """Return whether the buffers of a model differ from copies of them."""
    now = list(model.buffers())
    return len(now) != len(copies) or not all(map(torch.equal, now, copies))
