"""The optimizer that a DeepSpeed engine steps: a copy of the user's, over the parameters that the engine flattens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

_OF_INSTANCE = ("step", "zero_grad")


def split_groups(optimizer: Optimizer, own: set[int]) -> list[tuple[int, list[nn.Parameter]]]:
    """Return the parameters of an optimizer that are in ``own``, each list with the number of its group.

    A group is split where its parameters have different step counts: a flat shard has one count.
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
    """Return a copy of an optimizer for the chosen parameters, by the number of their group, without state."""
    copied = object.__new__(type(optimizer))
    vars(copied).update({name: value for name, value in vars(optimizer).items() if name not in _OF_INSTANCE})
    copied.state = defaultdict(dict)
    copied.param_groups = [{**optimizer.param_groups[index], "params": values} for index, values in chosen]
    return copied
