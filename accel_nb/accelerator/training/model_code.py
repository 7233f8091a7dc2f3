"""The functions that a model's classes compute with, which the cells of a notebook may replace."""

from __future__ import annotations

import types

from torch import nn

from accel_nb.runtime.tensors.instance_patching import innermost_class

ModelCode = dict[tuple[type, str], object]


def model_classes(model: nn.Module) -> frozenset[type]:
    """Return the classes of a model and its submodules, without those that are made for an instance."""
    return frozenset(innermost_class(part) for part in model.modules())


def code_of(classes: frozenset[type]) -> ModelCode:
    """Return ``forward`` of each class, and every function of the notebook's classes among them and their bases."""
    found: ModelCode = {}
    for kind in classes:
        found[kind, "forward"] = kind.forward  # type: ignore[attr-defined]
        for base in kind.__mro__:
            if base.__module__ == "__main__":
                found |= {
                    (base, name): item for name, item in vars(base).items() if isinstance(item, types.FunctionType)
                }
    return found
