"""The storages of parameters before a strategy moves them; other tensors of the user may share them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from accel_nb.runtime.distributed.sharded import ParameterMemory, memory_layout


def storages_of(parameters: Iterable[nn.Parameter]) -> ParameterMemory:
    """Return the storages of parameters, and the parameters themselves, by their layouts."""
    layouts = {memory_layout(value): value for value in parameters}
    return {layout: (value.untyped_storage(), value) for layout, value in layouts.items() if layout is not None}


def replaced_storages(memory: ParameterMemory) -> ParameterMemory:
    """Return the part of ``memory`` that its parameters no longer use."""
    return {layout: found for layout, found in memory.items() if memory_layout(found[1]) != layout}


def storages_without_layouts(memory: ParameterMemory) -> ParameterMemory:
    """Return the storages without the layouts of parameters: other tensors in them cannot be replaced by shards."""
    return {(storage, None): found for (storage, *_), found in memory.items()}
