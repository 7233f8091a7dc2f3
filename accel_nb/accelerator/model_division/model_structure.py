"""Comparison of a model's modules and hooks: a row layout of its calls is valid until these change."""

from __future__ import annotations

from collections.abc import Hashable

from torch import nn

from accel_nb.accelerator.model_division.call_observers import global_hooks


def structure_of(model: nn.Module) -> Hashable:
    """Return the number of hooks that a call or its backward pass runs, and the ids of a model's modules and forwards.

    Reads ``_parameters``: in a sharded model ``model.parameters()`` may gather them, a collective of all ranks.
    """
    num_hooks = len(global_hooks())
    parts: list[int] = []
    seen: set[int] = set()
    waiting: list[nn.Module | None] = [model]
    for part in waiting:  # without `model.modules()`, which takes three times as long
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        names = part.__dict__
        parts.append(id(part))
        if "forward" in names:
            parts.append(id(names["forward"]))
        if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks:
            num_hooks += len(part._forward_hooks) + len(part._forward_pre_hooks)
            num_hooks += len(part._backward_hooks) + len(part._backward_pre_hooks)
        for value in part._parameters.values():
            if value is not None and (value._backward_hooks or value._post_accumulate_grad_hooks):
                num_hooks += len(value._backward_hooks or ()) + len(value._post_accumulate_grad_hooks or ())
        if children := part._modules:
            waiting += children.values()
    return num_hooks, tuple(parts)
