"""Replacement of the parameters of optimizers when a model is sharded or restored."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn
from torch.optim import Optimizer


def replace_parameters(
    optimizer: Optimizer,
    changed: Mapping[int, nn.Parameter],
    convert: Callable[[nn.Parameter, Tensor], Tensor],
) -> list[tuple[Tensor, Tensor]]:
    """Replace parameters of an optimizer by ``changed`` (new ones by id of the old), and convert state of their shape.

    Return the tensors of the state that were replaced, each with its replacement.
    """
    replaced: list[tuple[Tensor, Tensor]] = []
    for group in optimizer.param_groups:
        for index, old in enumerate(group["params"]):
            new = changed.get(id(old))
            if new is None:
                continue
            group["params"][index] = new
            if old in optimizer.state:
                before = optimizer.state.pop(old)
                state = optimizer.state[new] = {
                    name: convert(new, value) if isinstance(value, Tensor) and value.dim() else value
                    for name, value in before.items()
                }
                replaced += [(value, state[name]) for name, value in before.items() if value is not state[name]]
    return replaced
