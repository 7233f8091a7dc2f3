"""Tensors that are trained without belonging to a module, so that their gradients are not averaged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

from torch import Tensor, nn
from torch.jit import ScriptModule

from accel_nb.accelerator.plain_cells.detection.object_graph import find_training_objects
from accel_nb.runtime.container_items import items_of

_MAX_LEAVES = 1000


def find_unmanaged_names(names: Mapping[str, Any], module_parameters: Set[int]) -> list[str]:
    """Return the sorted names of tensors that require gradients but are in no module, and of scripted models with such.

    ``module_parameters`` are the ids of parameters of modules; those of modules reachable from ``names`` are added.
    """
    found = find_training_objects(names.values())
    modules = [item for item in found if isinstance(item, nn.Module) and not isinstance(item, ScriptModule)]
    owned = module_parameters | {id(value) for module in modules for value in module.parameters()}
    return sorted(name for name, value in names.items() if any(id(leaf) not in owned for leaf in _find_leaves(value)))


def _find_leaves(value: Any) -> Iterable[Tensor]:
    """Return the tensors of a value that are leaves and require gradients: itself, or those directly in it."""
    if isinstance(value, ScriptModule):
        value = list(value.parameters())
    inside = items_of(value, _MAX_LEAVES) if isinstance(value, list | tuple | dict) else (value,)
    return [item for item in inside if isinstance(item, Tensor) and item.requires_grad and item.is_leaf]
