"""Detection of hooks on a model's calls and gradients that the user or other libraries have registered.

It is unknown how they use the values that they receive, such as the features of each sample.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Collection, Iterable
from typing import Any

from torch import nn

from accel_nb.accelerator.model_division.call_observers import global_hooks
from accel_nb.runtime.process.user_code import is_user_module

_TRAINING_PACKAGES = frozenset({"accel_nb", "deepspeed", "torch"})
"""Their hooks normalize weights, gather shards and the like; they keep no values of samples."""
_FUNCTIONS = "torch.nn.functional"


def has_gradient_hooks(model: nn.Module) -> bool:
    """Return whether hooks that are no part of a model receive its gradients.

    Reads ``_parameters``: in a sharded model ``model.parameters()`` may gather them, a collective of all ranks.
    """
    parts = list(model.modules())
    values = [value for part in parts for value in part._parameters.values() if value is not None]
    holders = [(part, "_backward_hooks", "_backward_pre_hooks") for part in parts]
    holders += [(value, "_backward_hooks", "_post_accumulate_grad_hooks") for value in values]
    return _has_foreign(hook for holder, *names in holders for name in names for hook in _hooks_of(holder, name))


def has_inner_hooks(model: nn.Module) -> bool:
    """Return whether hooks that are no part of a model, or are on all modules, receive its gradients or inner calls."""
    parts = list(model.modules())
    names = ("_forward_hooks", "_forward_pre_hooks")
    hooks = (hook for part in parts if part is not model for name in names for hook in _hooks_of(part, name))
    # A library's model may collect its results by the library's hooks.
    packages = {_package_of(type(part)) for part in parts}
    return has_gradient_hooks(model) or _has_foreign([*hooks, *global_hooks()], packages)


def _hooks_of(holder: Any, name: str) -> Iterable[Any]:
    return (getattr(holder, name, None) or {}).values()


def _has_foreign(hooks: Iterable[Any], packages: Collection[str] = ()) -> bool:
    """Return whether one of the hooks is the user's, or of a library other than those in ``packages``."""
    return any(_is_foreign(hook, packages) for hook in hooks)


def _is_foreign(hook: Any, packages: Collection[str]) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    module = getattr(hook, "__module__", None)
    # Libraries use their own functions as hooks; only users register a function such as `torch.clamp`.
    if isinstance(hook, types.BuiltinFunctionType) or module == _FUNCTIONS or is_user_module(module):
        return True
    package = _package_of(hook)
    return bool(package) and package not in _TRAINING_PACKAGES and package not in packages


def _package_of(value: Any) -> str:
    return (getattr(value, "__module__", None) or "").partition(".")[0]
