"""Tensors that are trained without being in a module, as first lessons do: nothing averages their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set, ValuesView
from typing import Any

from torch import Tensor, nn

from accel_nb.accelerator.plain_cells.object_graph import trained_objects

_MAX_LEAVES = 1000


def loose_names(names: Mapping[str, Any], known: Set[int]) -> list[str]:
    """Return the names, sorted, of what requires gradients and is neither known by its id nor of a module there."""
    modules = [item for item in trained_objects(names.values()) if isinstance(item, nn.Module)]
    owned = known | {id(value) for module in modules for value in module.parameters()}
    return sorted(name for name, value in names.items() if any(id(leaf) not in owned for leaf in _leaves(value)))


def _leaves(value: Any) -> Iterable[Tensor]:
    """Return the tensors that a value is, or holds directly, and that gradients are collected for."""
    inside = value.values() if isinstance(value, dict) else value
    is_many = isinstance(inside, list | tuple | ValuesView) and len(inside) <= _MAX_LEAVES
    return [
        item
        for item in (inside if is_many else (inside,))
        if isinstance(item, Tensor) and item.requires_grad and item.is_leaf
    ]
