"""The parameters of optimizers."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer


def stepped_parameters(*optimizers: Optimizer) -> list[nn.Parameter]:
    """Return the parameters of optimizers in the order of their groups; a parameter of two optimizers appears twice."""
    return [value for optimizer in optimizers for group in optimizer.param_groups for value in group["params"]]
