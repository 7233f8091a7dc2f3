"""The attributes that the user's code has set on modules and their parameters, on optimizers and on schedulers."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from typing import Any

from accel_nb.pool.sync.objects.object_kinds import is_optimizer, is_tensor
from accel_nb.pool.sync.objects.user_hooks import is_of_training_library
from accel_nb.runtime.tensors.module_paths import parameter_at, submodule_at

_TORCH_ATTRIBUTES = frozenset(
    {
        "training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_is_full_backward_hook",
        "_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_state_dict_hooks",
        "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", "_version",
        "_compiled_call_impl", "forward",
    }
)  # fmt: skip

_OF_TENSORS = ("_accel_nb", "_fsdp", "_is_param")
"""Beginnings of the names of attributes that this package and torch set on parameters."""

OPTIMIZER_PREFIXES = ("_optimizer_", "_zero_grad", "_warned", "_patched", "_opt_called")
"""Beginnings of the names of attributes that torch sets on optimizers."""
_OPTIMIZER_ATTRIBUTES = frozenset({"state", "param_groups", "defaults", "step", "zero_grad"})
_OPTIMIZER_PACKAGES = ("torch.", "accel_nb.", "builtins", "typing", "abc")


def user_attributes(module: Any) -> dict[str, dict[str, Any]]:
    """Return by path the attributes that the user's code has set on a module, its submodules and its parameters.

    Tensors, submodules, hooks, flags and private attributes of torch's layers are not included; ``forward`` is.
    """
    from accel_nb.runtime.tensors.instance_patching import innermost_class  # imports torch

    found: dict[str, dict[str, Any]] = {}
    private_names: dict[type, frozenset[str] | None] = {}
    for path, part in module.named_modules():
        kind = innermost_class(part)
        if kind not in private_names:
            private_names[kind] = _private_names(kind)
        private = private_names[kind]
        hidden = vars(part).get("_accel_nb_hidden", ())  # attributes that a training library has set
        own = {
            name: value
            for name, value in vars(part).items()
            if name not in _TORCH_ATTRIBUTES
            and name not in hidden
            and not name.startswith(("_accel_nb", "__composable_api"))
            and not (name.startswith("_") and (private is None or name in private))
        }
        if (forward := users_forward(part)) is not None:
            own["forward"] = forward
        if own:
            found[path] = own
    return found | {path: own for path, value in module.named_parameters() if (own := tensor_attributes(value))}


def users_forward(module: Any) -> Any:
    """Return the ``forward`` that the user's code has set on a module, below those of training libraries, or None."""
    from accel_nb.runtime.tensors.instance_patching import forward_of_user, innermost_class  # imports torch

    forward = forward_of_user(module)
    while forward is not None and is_of_training_library(forward):
        forward = getattr(forward, "__wrapped__", None)
    usual = getattr(innermost_class(module), "forward", None)
    is_from_user = getattr(forward, "__func__", forward) is not usual and type(forward).__name__ != "ScriptMethod"
    return forward if is_from_user else None


def can_set_forward(module: Any) -> bool:
    """Return whether no training library has replaced the ``forward`` of a module."""
    from accel_nb.runtime.tensors.instance_patching import is_of_instance  # imports torch

    return not is_of_instance(type(module)) and not is_of_training_library(vars(module).get("forward"))


def _private_names(kind: type) -> frozenset[str] | None:
    """Return the private names in the code of those layers of torch that a class inherits from.

    None for a class of torch that inherits from one: all its private attributes are torch's.
    """
    layers = [base for base in kind.__mro__ if base.__module__.startswith("torch.")][:-1]
    if layers and layers[0] is kind:
        return None
    return frozenset[str]().union(*map(_names_in_code, layers))


@functools.cache
def _names_in_code(kind: type) -> frozenset[str]:
    """Return the private names that the methods of a class of torch read and write."""
    functions = (getattr(item, "__func__", getattr(item, "fget", item)) for item in vars(kind).values())
    waiting = [item.__code__ for item in functions if isinstance(item, types.FunctionType)]
    found: set[str] = set()
    while waiting:
        code = waiting.pop()
        found.update(name for name in code.co_names if name.startswith("_"))
        waiting += [item for item in code.co_consts if isinstance(item, types.CodeType)]
    return frozenset(found)


def attribute_owners(module: Any) -> dict[str, Any]:
    """Return by path the objects whose attributes are those of a module: its submodules, itself and its parameters."""
    return dict(module.named_modules()) | dict(module.named_parameters())


def attribute_owner(module: Any, path: str) -> Any:
    """Return one object of `attribute_owners`; raise LookupError if there is none."""
    owner, _, name = path.rpartition(".")
    holder = submodule_at(module, owner)
    return submodule_at(holder, name) if name in holder._modules or not name else parameter_at(holder, name)


def optimizer_attributes(optimizer: Any) -> dict[str, Any]:
    """Return the attributes that the user's code has set on an optimizer, without the optimizers that it wraps."""
    hides_private = all(kind.__module__.startswith(_OPTIMIZER_PACKAGES) for kind in type(optimizer).__mro__)
    hidden = ("_",) if hides_private else ("_accel_nb", *OPTIMIZER_PREFIXES)
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in _OPTIMIZER_ATTRIBUTES and not name.startswith(hidden) and not is_optimizer(value)
    }


def scheduler_attributes(scheduler: Any) -> dict[str, Any]:
    """Return the attributes of a scheduler, without those that preparing it has set."""
    return {
        name: value for name, value in vars(scheduler).items() if name != "step" and not name.startswith("_accel_nb")
    }


def has_tensor_keys(value: Any) -> bool:
    """Return whether a container has a dict whose keys are tensors, such as the parameters of an optimizer."""
    if isinstance(value, dict):
        return any(map(is_tensor, value)) or any(map(has_tensor_keys, value.values()))
    return isinstance(value, list | tuple) and any(map(has_tensor_keys, value))


def tensor_attributes(tensor: Any) -> dict[str, Any]:
    """Return the attributes that the user's code has set on a tensor."""
    own = vars(tensor)
    if "__getstate__" in own:  # set by a training library that stores its attributes on parameters
        own = own["__getstate__"]()
    return {name: value for name, value in own.items() if not name.startswith(_OF_TENSORS)}


def set_tensor_attributes(tensor: Any, own: Mapping[str, Any]) -> None:
    """Set the attributes of a tensor to those that `tensor_attributes` returned for another."""
    for name in tensor_attributes(tensor).keys() - own.keys():
        delattr(tensor, name)
    vars(tensor).update(own)
