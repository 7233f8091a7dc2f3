"""Modules without the hooks and the attributes that a DeepSpeed engine has set on them."""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Set
from typing import Any

from torch import nn

from accel_nb.runtime.tensors.instance_patching import innermost_class

HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_HIDDEN = "_accel_nb_hidden"
"""The attribute of a module or parameter with the names of the attributes that its copies do not get."""
_LATER = ("ds_grads_remaining", "applied_pre_backward_ref_cnt")
"""Attributes that DeepSpeed sets on modules when they are called."""


def hide_attributes(items: Iterable[Any], known: Mapping[int, Set[str]]) -> None:
    """Mark the attributes of modules and parameters that are not ``known``, by id, so that copies do not get them."""
    for item in items:
        if new := set(vars(item)) - known[id(item)]:
            vars(item)[_HIDDEN] = frozenset({*new, *_LATER, _HIDDEN})


def visible_attributes(item: Any) -> dict[str, Any]:
    """Return the attributes of a module or parameter that are not hidden, such as attributes set by user code."""
    hidden = vars(item).get(_HIDDEN, ())
    return {name: value for name, value in vars(item).items() if name not in hidden}


def remove_hidden(items: Iterable[Any]) -> None:
    """Remove the hidden attributes of modules and parameters."""
    items = list(items)
    remove_attributes(items, {id(item): visible_attributes(item).keys() for item in items})


def remove_attributes(items: Iterable[Any], known: Mapping[int, Set[str]]) -> None:
    """Remove the attributes of modules and parameters that are not ``known``, by id of an item."""
    for item in items:
        names = vars(item)
        if "_original_parameters" in names:
            original = names["_original_parameters"]
            original.clear()
            original.update(names["_parameters"].items())
            names["_parameters"] = original
        for name in set(names) - known[id(item)]:
            del names[name]


def drop_hooks(module: nn.Module, name: str, known: Set[int]) -> None:
    """Remove the hooks of a module under a name of `HOOKS` whose keys are not ``known``."""
    hooks = vars(module)[name]
    for key in set(hooks) - known:
        del hooks[key]
        for extra in (f"{name}_with_kwargs", f"{name}_always_called"):
            vars(module).get(extra, {}).pop(key, None)


def copy_module(
    module: nn.Module, parameters: Mapping[int, Any], done: dict[int, nn.Module] | None = None
) -> nn.Module:
    """Return a copy of a tree of modules, with the ``parameters`` by the ids of those that they replace.

    ``done`` are the copies by id of the module.
    """
    done = {} if done is None else done
    if id(module) in done:
        return done[id(module)]
    copied = done[id(module)] = object.__new__(innermost_class(module))
    kept = visible_attributes(module)
    held = module._parameters.items()
    kept["_parameters"] = {name: parameters.get(id(value), value) for name, value in held}
    kept["_modules"] = {
        name: None if part is None else copy_module(part, parameters, done) for name, part in module._modules.items()
    }
    for name in HOOKS:
        kept[name] = OrderedDict((key, hook) for key, hook in kept[name].items() if not _is_of_deepspeed(hook))
        for extra in (f"{name}_with_kwargs", f"{name}_always_called"):
            if extra in kept:
                kept[extra] = OrderedDict((key, flag) for key, flag in kept[extra].items() if key in kept[name])
    vars(copied).update(kept)
    return copied


def _is_of_deepspeed(hook: Any) -> bool:
    function = hook.func if hasattr(hook, "func") else hook
    return isinstance(function, types.FunctionType) and function.__module__.startswith("deepspeed.")
