"""Tensors that are trained without belonging to a module, so that their gradients are not averaged."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Set
from typing import Any

from torch import Tensor, nn
from torch.jit import ScriptModule

from accel_nb.accelerator.core import Accelerator
from accel_nb.accelerator.plain_cells.cell_warnings import warn_tensors_without_module
from accel_nb.accelerator.plain_cells.detection.object_graph import find_training_objects
from accel_nb.runtime.container_items import items_of
from accel_nb.runtime.leaf_tensors import is_leaf
from accel_nb.runtime.process.user_code import cell_frames

_MAX_LEAVES = 1000


class UnmanagedTensors:
    """Searches a cell for trained tensors in no module, once for each location where a loop starts."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._stepper = accelerator.components.stepper
        self._namespace: dict[str, Any] = {}
        self._names: tuple[str, ...] = ()
        # By location of a loop: the names of the tensors that were found.
        self._found: dict[Any, list[str]] = {}
        # Tensors of earlier cells whose names the current cell rebinds; None before its first statement.
        self._stale: list[weakref.ref[Tensor]] | None = None

    def begin_cell(self) -> None:
        """Reset for a new cell."""
        self._found.clear()
        self._stale = None

    def begin_statement(self, namespace: dict[str, Any], names: Iterable[str], bound: Iterable[str]) -> None:
        """Set the names of the cell; ``bound`` are those that it binds before it reads them."""
        if self._stale is None:
            self._stale = [weakref.ref(namespace[name]) for name in bound if isinstance(namespace.get(name), Tensor)]
        self._namespace = namespace
        self._names = tuple(names)

    def are_trained(self) -> bool:
        """Return whether the cell trains tensors that are in no module, and warn about them.

        Their gradients are not averaged. Called when a loop starts, so that tensors that are made inside of the loop
        are not found.
        """
        if self._stepper.strategy.capabilities.shards_params:
            return False  # a list may reference parameters from before the strategy sharded them
        frames = list(cell_frames(self._namespace))
        location = tuple((frame.f_code, frame.f_lineno) for frame in frames)
        if location not in self._found:
            names = {name: self._namespace[name] for name in self._names if name in self._namespace}
            for frame in frames:
                names |= frame.f_locals if frame.f_globals is not frame.f_locals else {}
            stale = [ref() for ref in self._stale or ()]
            names = {name: value for name, value in names.items() if not any(value is item for item in stale)}
            found = self._found[location] = find_unmanaged_names(names, self._stepper.averaged_parameters)
            if found:
                warn_tensors_without_module(self._accelerator, found)
        return bool(self._found[location])


def find_unmanaged_names(names: Mapping[str, Any], module_parameters: Set[int]) -> list[str]:
    """Return the sorted names of tensors that require gradients but are in no module, and of ScriptModules with such.

    ``module_parameters`` are the ids of parameters of modules; parameters of modules in ``names`` are added.
    """
    found = find_training_objects(names.values())
    modules = [item for item in found if isinstance(item, nn.Module) and not isinstance(item, ScriptModule)]
    owned = module_parameters | {id(value) for module in modules for value in module.parameters()}
    return sorted(name for name, value in names.items() if any(id(leaf) not in owned for leaf in _find_leaves(value)))


def _find_leaves(value: Any) -> Iterable[Tensor]:
    """Return the leaf tensors that require gradients: the value itself, or tensors directly in it."""
    if isinstance(value, ScriptModule):
        value = list(value.parameters())
    inside = items_of(value, _MAX_LEAVES) if isinstance(value, list | tuple | dict) else (value,)
    return [item for item in inside if isinstance(item, Tensor) and item.requires_grad and is_leaf(item)]
