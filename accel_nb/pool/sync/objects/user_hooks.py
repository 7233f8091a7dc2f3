"""The user's hooks of tensors and optimizers and methods of optimizers, without those of training libraries."""

from __future__ import annotations

import copyreg
import sys
import types
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from accel_nb.pool.sync.objects.object_kinds import is_optimizer
from accel_nb.runtime.leaf_tensors import is_leaf

_HOOKING_PACKAGES = frozenset({"accel_nb", "deepspeed", "torch"})
"""Training libraries, whose hooks and replaced methods are valid in one process only."""

OPTIMIZER_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
"""The attributes in which an optimizer has dicts of hooks by `RemovableHandle.id`."""

GRADIENT_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""The attributes in which a leaf tensor has dicts of hooks by `RemovableHandle.id`; None if it has none."""

HookId = tuple[str, int, int]
"""The attribute that holds a hook, its number, and its `id`."""


_METHODS = ("step", "zero_grad")
"""Methods that torch's schedulers and training libraries replace on an optimizer too."""


def is_from_user(hook: Any) -> bool:
    """Return whether a function is defined outside of `_HOOKING_PACKAGES`."""
    return defining_module(hook).partition(".")[0] not in _HOOKING_PACKAGES


def defining_module(hook: Any) -> str:
    """Return the name of the module that defines a hook; "" if it has none, as a method of a built-in type."""
    name = getattr(hook, "__module__", None)
    return name if isinstance(name, str) else ""


def gradient_hooks(tensor: Any) -> dict[str, dict[int, Any]]:
    """Return the user's gradient hooks of a leaf tensor by attribute and number.

    If all hooks are the user's, the tensor's own dict is returned and not a copy, since handles refer to it.
    """
    found: dict[str, dict[int, Any]] = {}
    for name in GRADIENT_HOOKS if is_leaf(tensor) else ():
        if hook_dict := getattr(tensor, name, None):
            own = {number: hook for number, hook in hook_dict.items() if is_from_user(hook)}
            if own:
                found[name] = hook_dict if len(own) == len(hook_dict) else OrderedDict(own)
    return found


def gradient_hook_dict(tensor: Any, name: str) -> dict[int, Any]:
    """Return the dict of a leaf tensor's hooks in an attribute of `GRADIENT_HOOKS`; a new one if it has none."""
    if getattr(tensor, name) is None:
        setattr(tensor, name, OrderedDict())
    return getattr(tensor, name)


def optimizer_hooks(optimizer: Any) -> dict[str, dict[int, Any]]:
    """Return the user's hooks of an optimizer by attribute and number.

    If all hooks are the user's, the optimizer's own dict is returned and not a copy, since handles refer to it.
    """
    found: dict[str, dict[int, Any]] = {}
    for name in OPTIMIZER_HOOKS:
        if hook_dict := vars(optimizer).get(name):
            own = {number: hook for number, hook in hook_dict.items() if is_from_user(hook)}
            found[name] = hook_dict if len(own) == len(hook_dict) else OrderedDict(own)
    return {name: hook_dict for name, hook_dict in found.items() if hook_dict}


def optimizer_hook_ids(optimizer: Any) -> tuple[HookId, ...]:
    """Return the identities of the user's hooks of an optimizer, valid in this process."""
    return tuple(
        (name, number, id(hook))
        for name, hook_dict in optimizer_hooks(optimizer).items()
        for number, hook in hook_dict.items()
    )


def changed_hooks(optimizer: Any, before: Collection[HookId]) -> dict[str, dict[int, Any]] | None:
    """Return None if no hook has changed since ``before``, else the user's hooks, with None for unchanged ones."""
    if optimizer_hook_ids(optimizer) == before:
        return None
    return {
        name: {number: None if (name, number, id(hook)) in before else hook for number, hook in hook_dict.items()}
        for name, hook_dict in optimizer_hooks(optimizer).items()
    }


def set_changed_hooks(optimizer: Any, hooks: Mapping[str, Mapping[int, Any]]) -> None:
    """Apply the result of `changed_hooks` to another optimizer, in its own dicts: handles refer to these."""
    for name in OPTIMIZER_HOOKS:
        hook_dict = vars(optimizer).setdefault(name, OrderedDict())
        others = {number: hook_dict[number] if hook is None else hook for number, hook in hooks.get(name, {}).items()}
        for number in [number for number, hook in hook_dict.items() if is_from_user(hook)]:
            del hook_dict[number]
        hook_dict.update(others)
        reserve_numbers(others)


@contextmanager
def without_hooks(optimizer: Any) -> Iterator[None]:
    """Remove the user's hooks of an optimizer in the with statement, as its state is sent to another process."""
    hooks_by_attribute = {name: dict(hooks) for name in OPTIMIZER_HOOKS if (hooks := vars(optimizer).get(name))}
    try:
        if hooks_by_attribute:
            set_changed_hooks(optimizer, {})
        yield
    finally:
        for name, hooks in hooks_by_attribute.items():
            vars(optimizer)[name].clear()
            vars(optimizer)[name].update(hooks)


def reserve_numbers(numbers: Iterable[int]) -> None:
    """Keep numbers of hooks from another process from being used again: a new hook would replace the old one."""
    torch = sys.modules.get("torch")
    if torch is not None:
        handle = torch.utils.hooks.RemovableHandle
        handle.next_id = max(handle.next_id, 1 + max(numbers, default=-1))


def next_number() -> int:
    """Return the number that the next hook of this process has; 0 if torch is not imported."""
    torch = sys.modules.get("torch")
    return 0 if torch is None else torch.utils.hooks.RemovableHandle.next_id


def own_methods(optimizer: Any) -> dict[str, Any]:
    """Return by name the methods that the user's code has set on an optimizer in place of those of its class."""
    found: dict[str, Any] = {}
    for name in _METHODS:
        method = vars(optimizer).get(name)
        while method is not None and is_of_training_library(method):
            method = replaced_method(optimizer, name, method)
        if method is not None:
            found[name] = method
    return found


def set_own_methods(optimizer: Any, methods: Mapping[str, Any]) -> None:
    """Set the user's methods on an optimizer that no training library has prepared."""
    for name in _METHODS:
        if name in methods:
            setattr(optimizer, name, methods[name])
        elif name in own_methods(optimizer):
            delattr(optimizer, name)


def method_ids(optimizer: Any) -> tuple[tuple[str, int], ...]:
    """Return the identities of `own_methods`, valid in this process."""
    return tuple((name, id(getattr(item, "__func__", item))) for name, item in own_methods(optimizer).items())


def is_of_training_library(method: Any) -> bool:
    """Return whether a function is defined in a training library.

    Its globals decide, as `functools.wraps` copies ``__module__``.
    """
    return getattr(method, "__globals__", {}).get("__name__", "").partition(".")[0] in _HOOKING_PACKAGES


def is_replacement(value: Any) -> bool:
    """Return whether a value is a method that a training library has set on an optimizer in place of the class's."""
    if not (isinstance(value, types.MethodType) and is_optimizer(value.__self__) and is_of_training_library(value)):
        return False
    return value.__func__ is not getattr(type(value.__self__), value.__name__, None)


def replaced_method(optimizer: Any, name: str, method: Any) -> Any:
    """Return the method that ``method``, of torch or a training library, replaces; None for that of the class."""
    inner = getattr(method, "__wrapped__", None)
    if isinstance(method, types.MethodType):
        return None if inner is getattr(type(optimizer), name) else inner
    # A scheduler's wrapper has the plain function in `__wrapped__`.
    return None if inner in (None, getattr(type(optimizer), name)) else types.MethodType(inner, optimizer)


def is_hook_handle(value: Any) -> bool:
    """Return whether a value is the handle of a hook that code has registered."""
    torch = sys.modules.get("torch")
    return torch is not None and type(value) is torch.utils.hooks.RemovableHandle


def reduce_hook_handle(handle: Any) -> Any:
    """Reduce a handle, without the references that are None because their module was freed."""
    hooks, number, *others = handle.__getstate__()
    present = [tuple(item for item in extra if item is not None) for extra in others]
    return copyreg.__newobj__, (type(handle),), (hooks, number, *present)  # type: ignore[attr-defined]
