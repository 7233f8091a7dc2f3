"""Forward passes that are only compared: they save no tensors for a backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class BackwardNeeded(Exception):
    """Raised if code computes gradients of results that were computed inside of `drop_saved_tensors`."""


@contextmanager
def drop_saved_tensors() -> Iterator[None]:
    """Compute without keeping tensors for a backward pass; unlike under `torch.no_grad`, code sees the grad mode on.

    Code inside of the block that computes gradients itself raises `BackwardNeeded`.
    """
    with saved_tensors_hooks(_drop, _refuse):
        yield


def _drop(_: Tensor) -> None:
    return None


def _refuse(_: None) -> Tensor:
    raise BackwardNeeded
