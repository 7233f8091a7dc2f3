"""Gradients that some ranks have and others lack, as where ranks use different parameters of a model in one step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from accel_nb.runtime.distributed.communicator import Communicator


def any_rank_has_gradient(comm: Communicator, parameters: Sequence[Tensor]) -> list[bool]:
    """Return for each parameter whether any rank has a gradient of it; every rank calls, with the same parameters."""
    if not parameters:
        return []
    present = torch.tensor([value.grad is not None for value in parameters], dtype=torch.int32)
    return [bool(found) for found in comm.all_reduce(present, "max").tolist()]


def gradients_of_any_rank(comm: Communicator, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients that any rank has, set to zero on ranks that lack them.

    Every rank calls, with the same parameters, and gets as many gradients.
    """
    gradients: list[Tensor] = []
    for value, is_there in zip(parameters, any_rank_has_gradient(comm, parameters), strict=True):
        if is_there:
            if value.grad is None:
                value.grad = torch.zeros_like(value)
            gradients.append(value.grad)
    return gradients
