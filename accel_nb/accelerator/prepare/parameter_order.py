"""Alignment of the order of an optimizer's parameters among ranks: if code took it from a set, it differs."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer

from accel_nb.runtime.distributed.communicator import Communicator


def align_parameters(optimizers: Iterable[Optimizer], models: Iterable[nn.Module], comm: Communicator) -> None:
    """Put each group of parameters in the order that it has on rank 0. Every rank must call.

    Groups are left as they are if a parameter is in no model, or rank 0's group has other parameters.
    """
    parameters = [parameter for model in models for parameter in model.parameters()]
    places = {id(parameter): place for place, parameter in enumerate(parameters)}
    groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
    orders = [[places.get(id(parameter), -1) for parameter in group] for group in groups]
    for group, own, order in zip(groups, orders, comm.broadcast_json(orders), strict=False):
        if own != order and -1 not in own and sorted(own) == sorted(order):
            group[:] = [parameters[place] for place in order]
