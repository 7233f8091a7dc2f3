"""Tensors whose autograd graphs are in another process: they have the values, and refuse a backward pass to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from accel_nb.errors import MisuseError


class ComputedInAnotherProcess(torch.autograd.Function):
    """Node of an autograd graph in place of the operations that another process has run."""

    @staticmethod
    def forward(ctx: Any, requires_grad_input: Tensor, make: Callable[[], Tensor]) -> Tensor:
        """Return the tensor that ``make`` returns, which requires gradients as ``requires_grad_input`` does."""
        return make()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Raise MisuseError: the tensors that the result was computed from are not in this process."""
        raise MisuseError(
            "this backward pass reaches a tensor that was computed in another process, where its graph is: a graph is "
            "not sent between the notebook and the workers. Compute the tensor and call backward() in the same cell, "
            "or use its value only, by detach()"
        )


def as_computed_elsewhere(make: Callable[[], Tensor]) -> Tensor:
    """Return the tensor that ``make`` returns, as one that requires gradients and is not a leaf."""
    with torch.enable_grad():
        return ComputedInAnotherProcess.apply(torch.zeros((), requires_grad=True, device="cpu"), make)
