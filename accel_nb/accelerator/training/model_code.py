"""The functions of a model's classes, which later cells of a notebook may replace."""

from __future__ import annotations

import operator
import types

from torch import nn

from accel_nb.runtime.tensors.instance_patching import innermost_class

ModelCode = dict[tuple[type, str], object]


def code_in(model: nn.Module) -> tuple[frozenset[type], ModelCode]:
    """Return the classes of a model and its submodules, without those that are made for an instance, and their code."""
    classes = frozenset(innermost_class(part) for part in model.modules())
    return classes, code_of(classes)


def code_of(classes: frozenset[type]) -> ModelCode:
    """Return ``forward`` of each class, and every function of the notebook's classes among them and their bases."""
    found: ModelCode = {}
    for kind in classes:
        found[kind, "forward"] = getattr(kind, "forward", None)  # the class of scripted models has none
        for base in kind.__mro__:
            if base.__module__ == "__main__":
                found |= {
                    (base, name): item for name, item in vars(base).items() if isinstance(item, types.FunctionType)
                }
    return found


def is_changed(before: ModelCode, now: ModelCode) -> bool:
    """Return whether a function was replaced by one with other code.

    A new function with the same code is no change: pickling a model on one rank compiles a `torch.fx.GraphModule`
    again.
    """
    if before == now:
        return False
    return before.keys() != now.keys() or not all(_has_same_code(before[key], now[key]) for key in now)


def _has_same_code(first: object, second: object) -> bool:
    if first is second:
        return True
    if not (isinstance(first, types.FunctionType) and isinstance(second, types.FunctionType)):
        return False
    values = [(function.__defaults__ or ()) + (function.__closure__ or ()) for function in (first, second)]
    return (
        first.__code__ == second.__code__
        and not (first.__kwdefaults__ or second.__kwdefaults__)
        and len(values[0]) == len(values[1])
        and all(map(operator.is_, *values))
    )
