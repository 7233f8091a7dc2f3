"""The calls of a model's blocks: the tensor that a block takes from the one before, and hooks on calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn


def chain_input(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the tensor that a block takes from the one before: its first argument."""
    if args:
        return args[0] if isinstance(args[0], Tensor) else None
    return next((value for value in kwargs.values() if isinstance(value, Tensor)), None)


def with_chain_input(
    args: Sequence[Any], kwargs: Mapping[str, Any], value: Tensor
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the arguments of a block with another tensor in place of `chain_input`."""
    if args:
        return (value, *args[1:]), kwargs
    name = next(name for name, item in kwargs.items() if isinstance(item, Tensor))
    return args, {**kwargs, name: value}


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module, or one inside of it, has hooks, which could read or change its values."""
    return any(
        part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks
        for part in module.modules()
    )
