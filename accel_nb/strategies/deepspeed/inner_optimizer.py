"""The optimizer that a DeepSpeed engine steps: a copy of the user's, over the parameters that the engine flattens."""

from __future__ import annotations

import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

_OF_INSTANCE = ("step", "zero_grad")


def split_groups(optimizer: Optimizer, own: set[int]) -> list[tuple[int, list[nn.Parameter]]]:
    """Return the parameters of an optimizer that are in ``own``, each list with the number of its group.

    A group is split where its parameters have different step counts: a flat part has one count.
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

    Its step calls no hooks: they are called for the user's optimizer, by `stepping_after`.
    """
    copied = object.__new__(type(optimizer))
    vars(copied).update({name: value for name, value in vars(optimizer).items() if name not in _OF_INSTANCE})
    copied._optimizer_step_pre_hooks, copied._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):  # by torch, also for the hooks of all optimizers
        vars(copied)["step"] = types.MethodType(step.__wrapped__, copied)
    copied.state = defaultdict(dict)
    copied.param_groups = [{**optimizer.param_groups[index], "params": values} for index, values in chosen]
    return copied


@contextmanager
def stepping_after(optimizer: Optimizer, step: Callable[[], object]) -> Iterator[None]:
    """Call ``step`` once, when the optimizer's own method ends in the block, before its post-hooks.

    The method itself steps nothing, since the gradients of the parameters are None, but calls hooks and a closure.
    """
    has_stepped = False

    def step_once(*_: Any) -> None:
        nonlocal has_stepped
        if not has_stepped:  # a method that calls that of its base class has hooks twice
            has_stepped = True
            step()

    handle = optimizer.register_step_post_hook(step_once)
    optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        handle.remove()
