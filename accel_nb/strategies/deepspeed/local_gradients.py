"""Gradients in ``parameter.grad`` that result from this rank's rows only, until they are averaged."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.runtime.distributed.gradients import fill_missing_gradients


class LocalGradients:
    """Averages gradients when they are read, and not in each pass: few programs read them."""

    def __init__(self) -> None:
        # Whether no pass has added to them since.
        self.are_averaged = True

    def average(self, comm: Communicator, parameters: Sequence[nn.Parameter]) -> None:
        """Average the gradients of parameters over the ranks, unless they are averaged; every rank must call.

        Gradients that were averaged before are equal on all ranks, so averaging their sum with later ones is right.
        """
        if not self.are_averaged:
            self.are_averaged = True
            for gradient in fill_missing_gradients(comm, parameters):
                comm.all_reduce(gradient, "mean")
