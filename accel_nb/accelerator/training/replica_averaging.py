"""The mean of replicas that ranks have trained by themselves: weights, buffers and optimizer state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accel_nb.runtime.distributed.collectives import all_reduce_bucketed
from accel_nb.runtime.distributed.communicator import Communicator


@torch.no_grad()
def average_weights(comm: Communicator, model: nn.Module) -> None:
    """Average trainable parameters and floating-point buffers; every rank must call."""
    all_reduce_bucketed(comm, _weights(model), "mean")


@torch.no_grad()
def average_replica(comm: Communicator, optimizers: Iterable[Optimizer], model: nn.Module) -> None:
    """Average a model's weights and the optimizers' state of them; every rank must call."""
    all_reduce_bucketed(comm, [*_weights(model), *_optimizer_state(comm, optimizers, model)], "mean")


def _weights(model: nn.Module) -> Iterator[Tensor]:
    yield from (value for value in model.parameters() if value.requires_grad)
    yield from (value for value in model.buffers() if _has_mean(value))


def _optimizer_state(comm: Communicator, optimizers: Iterable[Optimizer], model: nn.Module) -> Iterator[Tensor]:
    """Yield the averaged state in the order of the model's parameters, which optimizers of several ranks may lack.

    State of a parameter that one rank has not updated is removed on the others, so that it is initialized again on all.
    """
    states = [(optimizer, parameter) for optimizer in optimizers for parameter in model.parameters()]
    own = [_averaged_names(optimizer.state.get(parameter, {})) for optimizer, parameter in states]
    for (optimizer, parameter), names in zip(states, zip(*comm.all_gather_json(own), strict=True), strict=True):
        if any(other != names[0] for other in names):
            optimizer.state.pop(parameter, None)
        elif names[0]:
            state = optimizer.state[parameter]
            yield from (state[name] for name in names[0])


def _averaged_names(state: Mapping[Any, Any]) -> list[Any]:
    return sorted(name for name, value in state.items() if _is_averaged(value))


def _is_averaged(value: object) -> bool:
    return isinstance(value, Tensor) and _has_mean(value) and value.dim() > 0


def _has_mean(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()
