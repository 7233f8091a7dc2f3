"""The functions that a model's classes compute with, which the cells of a notebook may replace."""

from __future__ import annotations

import types

from torch import nn

from accel_nb.runtime.tensors.instance_patching import innermost_class

ModelCode = dict[tuple[type, str], object]


def model_code(model: nn.Module) -> ModelCode:
    """Return ``forward`` of each class in a model, and every function of the notebook's classes."""
    found: ModelCode = {}
    for kind in {innermost_class(part) for part in model.modules()}:
        found[kind, "forward"] = kind.forward
        for base in kind.__mro__:
            if base.__module__ == "__main__":
                found |= {
                    (base, name): item for name, item in vars(base).items() if isinstance(item, types.FunctionType)
                }
    return found
