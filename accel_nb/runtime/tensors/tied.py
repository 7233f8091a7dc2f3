"""Search for tied parameters, and tying them again after a model was moved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from accel_nb.runtime.tensors.module_paths import parameter_at, submodule_at


def find_tied(model: nn.Module) -> list[list[str]]:
    """Return groups of two or more names that refer to the same parameter object."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def tie_again(model: nn.Module, groups: Iterable[Sequence[str]]) -> None:
    """Replace the parameters of each group by the first one of the group, in place."""
    for first, *others in groups:
        parameter = parameter_at(model, first)
        for name in others:
            owner, _, leaf = name.rpartition(".")
            submodule_at(model, owner)._parameters[leaf] = parameter


def move_tied(model: nn.Module, move: Callable[[nn.Module], object], optimizers: Iterable[Optimizer] = ()) -> None:
    """Move a model and keep its tied parameters and its optimizers valid.

    ``Module.to`` replaces parameters on some devices, and with some settings of ``torch.__future__``. Tied parameters
    stay one object, with one gradient and one state.
    """
    groups = find_tied(model)
    before = dict(model.named_parameters())
    move(model)
    tie_again(model, groups)
    changed = {id(old): parameter_at(model, name) for name, old in before.items()}
    changed = {key: new for key, new in changed.items() if id(new) != key}
    if changed:
        for optimizer in optimizers:
            _replace_parameters(optimizer, changed)


@torch.no_grad()
def _replace_parameters(optimizer: Optimizer, changed: dict[int, nn.Parameter]) -> None:
    """Replace parameters and their state in an optimizer."""
    for group in optimizer.param_groups:
        group["params"] = [changed.get(id(parameter), parameter) for parameter in group["params"]]
    for parameter in [parameter for parameter in optimizer.state if id(parameter) in changed]:
        optimizer.state[changed[id(parameter)]] = optimizer.state.pop(parameter)
