"""Optimizer states of models in stages: a rank has states only for the parameters of its stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accel_nb.runtime.distributed import sharded
from accel_nb.runtime.distributed.communicator import Communicator


def share_states(optimizers: Iterable[Optimizer], staged: Sequence[nn.Parameter], stages: Communicator) -> None:
    """Add the states of parameters that other stages hold, without their values; every rank must call.

    ``staged`` are all parameters that one stage alone holds, and ``stages`` connects the ranks of the stages.
    """
    for optimizer in optimizers:
        own = {
            str(number): {name: _describe(item) for name, item in optimizer.state[value].items()}
            for number, value in enumerate(staged)
            if value in optimizer.state and not sharded.is_absent(value)
        }
        found = {key: state for own in stages.all_gather_json(own) for key, state in own.items()}
        for number, value in enumerate(staged):
            if sharded.is_absent(value):
                optimizer.state.pop(value, None)
                state = found.get(str(number))
                if state is not None:
                    optimizer.state[value] = {name: _without_values(item, value) for name, item in state.items()}


def ordered_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return the state dict of an optimizer, in the same order on the ranks of all stages."""
    state = optimizer.state_dict()
    return {**state, "state": dict(sorted(state["state"].items()))}


def _describe(value: Any) -> list[Any]:
    """Return an item of an optimizer's state as JSON, without the values of shards."""
    if sharded.is_sharded(value):
        return ["shard", str(value.dtype)]
    if isinstance(value, Tensor):
        return ["tensor", str(value.dtype), value.tolist()]
    return ["plain", value]


def _without_values(described: Sequence[Any], parameter: Tensor) -> Any:
    """Return a state item, described by another rank, with an empty shard on this rank."""
    kind, value, *numbers = described
    if kind == "plain":
        return value
    dtype = getattr(torch, value.removeprefix("torch."))
    if kind == "tensor":
        return torch.tensor(numbers[0], dtype=dtype, device="cpu")
    return sharded.shard_like(parameter, sharded.local_shard(parameter).detach().to(dtype))
