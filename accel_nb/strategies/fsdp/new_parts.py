"""Parameters and buffers that code has added to a model since it was sharded."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from accel_nb.runtime.distributed import sharded


def gather_new_parts(model: nn.Module, own: Collection[int]) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Replace sharded parameters and buffers that code has computed from the model's parameters by full ones.

    Return pairs of replaced and full parameters. ``own`` are the ids of the model's parameters. ``weight_norm`` of a
    sharded model makes such parameters, and pruning such a buffer. Every rank must call.
    """
    found: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is not None and sharded.is_sharded(value) and id(value) not in own:
                whole: Any = value
                found.setdefault(id(value), (value, nn.Parameter(whole.full_tensor(), value.requires_grad)))
                module._parameters[name] = found[id(value)][1]
        for name, buffer in module._buffers.items():
            if buffer is not None and sharded.is_sharded(buffer):
                whole = buffer
                module._buffers[name] = whole.full_tensor()
    return list(found.values())


def put_back_renamed(model: nn.Module, originals: Mapping[int, nn.Parameter]) -> None:
    """Restore original parameters, by the ids of sharded ones, also under names that code has changed (pruning)."""
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is not None and id(value) in originals:
                module._parameters[name] = originals[id(value)]
