"""What preparing an object may change."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def look_of(model: nn.Module, optimizer: torch.optim.Optimizer, *others: Any) -> list[Any]:
    """Return all that preparing may change, by value or by identity."""
    values = [*model.parameters(), *model.buffers()]
    stepped = [value for group in optimizer.param_groups for value in group["params"]]
    hooks = [len(hooks) for part in model.modules() for name, hooks in vars(part).items() if "hooks" in name]
    return [
        [(type(part), sorted(vars(part)), sorted(map(id, part._parameters.values()))) for part in model.modules()],
        [(id(value), type(value), value.tolist(), sorted(vars(value))) for value in values],
        [None if value.grad is None else value.grad.tolist() for value in values],
        hooks,
        [(id(value), value in optimizer.state) for value in stepped],
        [{name: part.tolist() for name, part in optimizer.state[value].items()} for value in stepped],
        [id(getattr(vars(optimizer).get(name), "__func__", None)) for name in ("step", "zero_grad")],
        [(type(item), sorted(vars(item))) for item in others],
    ]
