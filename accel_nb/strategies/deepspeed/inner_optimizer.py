"""The optimizer that a DeepSpeed engine steps: a copy of the user's, over the parameters that the engine flattens."""

from __future__ import annotations

import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_NOT_COPIED = {"step", "zero_grad", "state", "param_groups", *_HOOKS}


def split_groups(optimizer: Optimizer, own: set[int]) -> list[tuple[int, list[nn.Parameter]]]:
    """Return the parameters of an optimizer that are in ``own``, as lists, each with the number of its group.

    A group is split if its parameters have different step counts, as a flat shard has one count.
    """
    found: list[tuple[int, list[nn.Parameter]]] = []
    for index, group in enumerate(optimizer.param_groups):
        alike: dict[Any, list[nn.Parameter]] = {}
        for value in group["params"]:
            if id(value) in own:
                step = optimizer.state.get(value, {}).get("step")
                alike.setdefault(None if step is None else float(step), []).append(value)
        found += [(index, values) for values in alike.values()]
    return found


def copy_optimizer(optimizer: Optimizer, chosen: Sequence[tuple[int, list[nn.Parameter]]]) -> Optimizer:
    """Return a copy of an optimizer for the chosen parameters, by the number of their group, without state.

    Its step calls no hooks: they are called for the user's optimizer, by `replacing_update`.
    """
    copied = object.__new__(type(optimizer))
    copy_attributes(optimizer, copied)
    vars(copied).update({name: OrderedDict() for name in _HOOKS})
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):  # by torch, also for the hooks of all optimizers
        vars(copied)["step"] = types.MethodType(step.__wrapped__, copied)
    copied.state = defaultdict(dict)
    copied.param_groups = [{**optimizer.param_groups[index], "params": values} for index, values in chosen]
    return copied


@contextmanager
def replacing_update(optimizer: Optimizer, step: Callable[[], object]) -> Iterator[None]:
    """Call ``step`` in place of the optimizer's own method in the block: after its closure, and between its hooks.

    The method then runs too, for an optimizer without parameters, since torch calls it after the hooks.
    """

    def step_before(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rest = [_evaluated(value) for value in args[1:]]
        named = {name: _evaluated(value) for name, value in kwargs.items()}
        step()
        return (copy_optimizer(optimizer, ()), *rest), named

    handle = optimizer.register_step_pre_hook(step_before)  # it is called last
    try:
        yield
    finally:
        handle.remove()


def copy_attributes(source: Optimizer, target: Optimizer) -> None:
    """Copy the attributes of an optimizer to its copy or back, such as attributes of a user's class."""
    vars(target).update({name: value for name, value in vars(source).items() if name not in _NOT_COPIED})


def _evaluated(value: Any) -> Any:
    """Return an argument of a step; a closure is replaced by one that returns the result of the call already made."""
    if not callable(value):
        return value
    with torch.enable_grad():
        result = value()
    return lambda: result
