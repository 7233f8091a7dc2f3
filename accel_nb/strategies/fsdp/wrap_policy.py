"""Choice of the modules of a model that are gathered, computed and freed one at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Literal

from torch import nn

from accel_nb.errors import ConfigError
from accel_nb.runtime.tensors.instance_patching import plain_class

Wrap = Literal["blocks", "size", "classes", "model"]


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return, by name, the outermost modules that are in a list with others of their class, and have submodules.

    They are the units that are gathered, compiled and checkpointed one at a time, also in a forecast.
    """
    children = dict(model.named_children())
    # Layers without submodules, such as a Linear, are too small to be units.
    kinds = Counter(plain_class(child) for child in children.values() if any(True for _ in child.children()))
    found: dict[str, nn.Module] = {}
    for name, child in children.items():
        if isinstance(model, nn.ModuleList | nn.Sequential) and kinds[plain_class(child)] > 1:
            found[name] = child
        else:
            found |= {f"{name}.{inner}": module for inner, module in repeated_blocks(child).items()}
    return found


def choose_units(model: nn.Module, wrap: Wrap, min_params: int, classes: Sequence[str]) -> list[nn.Module]:
    """Return the units inside of a model, inner ones before outer ones; the rest of the model is one more unit.

    Modules that cannot be called are left out, and modules with parameters that are tied to others outside, since one
    unit must hold all tied parameters. Raises `ConfigError` for classes that the model does not have.
    """
    if wrap == "model":
        return []
    if wrap == "classes":
        _check_classes(model, classes)
        chosen = [module for module in _inside_out(model) if type(module).__name__ in classes]
    elif wrap == "size":
        chosen = _by_size(model, min_params)
    else:
        chosen = list(repeated_blocks(model).values())
    reachable = _occurrences(model)
    return [
        module
        for module in chosen
        if not isinstance(module, nn.ModuleList | nn.ModuleDict)
        and (own := _occurrences(module))
        and all(reachable[key] == count for key, count in own.items())
    ]


def _inside_out(model: nn.Module) -> list[nn.Module]:
    return [module for module in reversed(list(model.modules())) if module is not model]


def _by_size(model: nn.Module, min_params: int) -> list[nn.Module]:
    """Return the smallest modules with at least ``min_params`` elements of parameters that are in no inner unit."""
    chosen: list[nn.Module] = []
    taken: set[int] = set()
    for module in _inside_out(model):
        own = {id(value): value.numel() for value in module.parameters() if id(value) not in taken}
        if sum(own.values()) >= min_params:
            chosen.append(module)
            taken |= own.keys()
    return chosen


def _check_classes(model: nn.Module, classes: Sequence[str]) -> None:
    known = sorted({type(module).__name__ for module in model.modules()})
    for name in classes:
        if name not in known:
            near = get_close_matches(name, known, 1)
            remedy = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
            raise ConfigError(f"fsdp.classes names {name}, and the {type(model).__name__} has no such module; {remedy}")


def _occurrences(root: nn.Module) -> dict[int, int]:
    """Return how many names each parameter has below a module, by id."""
    counts: dict[int, int] = {}
    for _, value in root.named_parameters(remove_duplicate=False):
        counts[id(value)] = counts.get(id(value), 0) + 1
    return counts
