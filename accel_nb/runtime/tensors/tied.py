"""Parameters that several modules share: finding them, and tying them again where moving a model untied them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer


def find_tied(model: nn.Module) -> list[list[str]]:
    """Return the names of parameters that are one and the same object, in groups of two or more."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def retie(model: nn.Module, groups: Iterable[Sequence[str]]) -> None:
    """Make the parameters of each group one object again: the first one, in place."""
    for first, *others in groups:
        parameter = model.get_parameter(first)
        for name in others:
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner)._parameters[leaf] = parameter


def move_tied(model: nn.Module, move: Callable[[nn.Module], object], optimizers: Iterable[Optimizer] = ()) -> None:
    """Move a model, and keep ties and optimizers as they were although the move may make every parameter anew.

    ``Module.to`` does so on some devices, and where ``torch.__future__`` says so. A gradient or state of a tied
    parameter stays one: it is not added up over the names that it goes by.
    """
    groups = find_tied(model)
    before = dict(model.named_parameters())
    move(model)
    retie(model, groups)
    changed = {id(old): model.get_parameter(name) for name, old in before.items()}
    changed = {key: new for key, new in changed.items() if id(new) != key}
    if changed:
        for optimizer in optimizers:
            _follow(optimizer, changed)


@torch.no_grad()
def _follow(optimizer: Optimizer, changed: dict[int, nn.Parameter]) -> None:
    """Let an optimizer step the parameters that have taken the place of its own."""
    for group in optimizer.param_groups:
        group["params"] = [changed.get(id(parameter), parameter) for parameter in group["params"]]
    for parameter in [parameter for parameter in optimizer.state if id(parameter) in changed]:
        optimizer.state[changed[id(parameter)]] = optimizer.state.pop(parameter)
