"""Gradients of a backward pass that no wrapper averages, so that they differ among ranks until they are averaged here.

With DDP they arise in calls that it does not prepare: in evaluation mode, by a second backward pass, of parameters that
were frozen when DDP was set up. With FSDP they are the gradients of scalars, which cannot be sharded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from accel_nb.runtime.distributed.communicator import Communicator


class LocalGradients:
    """Finds the gradients that change after it is built. Every rank must build it with the same parameters."""

    def __init__(self, comm: Communicator, parameters: Sequence[nn.Parameter], *, have_changed: bool = False) -> None:
        """Begin before a backward pass; with ``have_changed`` all gradients count as changed."""
        self._comm = comm
        self._before = [
            (value, None, 0) if have_changed or value.grad is None else (value, value.grad, value.grad._version)
            for value in parameters
        ]

    @torch.no_grad()
    def average(self) -> bool:
        """Average the gradients that have changed on any rank; return whether there are any. Every rank must call.

        A gradient that only other ranks have counts as zero on this rank.
        """
        changed = [_has_changed(*before) for before in self._before]
        is_any = (
            self._comm.all_reduce(torch.tensor(changed, dtype=torch.int32, device="cpu"), "max").tolist()
            if changed
            else []
        )
        found = [value for (value, _, _), is_changed in zip(self._before, is_any, strict=True) if is_changed]
        for value in found:
            if value.grad is None:
                value.grad = torch.zeros_like(value)
            self._comm.all_reduce(value.grad, "mean")
        return bool(found)


def _has_changed(parameter: nn.Parameter, gradient: Tensor | None, version: int) -> bool:
    now = parameter.grad
    return now is not None and (now is not gradient or now._version != version)
