"""Hooks of tensors and optimizers, and replaced methods of optimizers, without those of torch and of engines."""

from __future__ import annotations

import copyreg
import sys
import types
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from accel_nb.pool.sync.objects.object_kinds import is_optimizer

_HOOKING_PACKAGES = frozenset({"accel_nb", "deepspeed", "torch"})
"""Packages whose hooks are valid in one process only."""

OPTIMIZER_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
"""The attributes in which an optimizer has its hooks, by the numbers of their handles."""

GRADIENT_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""The attributes in which a leaf tensor has its hooks, by the numbers of their handles; None if it has none."""

HookId = tuple[str, int, int]
"""The attribute that holds a hook, its number, and its `id`."""


_METHODS = ("step", "zero_grad")
"""Methods that torch's schedulers and engines replace on an optimizer too."""


def is_users(hook: Any) -> bool:
    """Return whether a function is defined in no package that has hooks of its own."""
    return defining_module(hook).partition(".")[0] not in _HOOKING_PACKAGES


def defining_module(hook: Any) -> str:
    """Return the name of the module that defines a hook; "" if it has none, as a method of a built-in type."""
    name = getattr(hook, "__module__", None)
    return name if isinstance(name, str) else ""


def gradient_hooks(tensor: Any) -> dict[str, dict[int, Any]]:
    """Return the user's gradient hooks of a leaf tensor by attribute and number.

    Where these are all its hooks, the result has its own dict, to which handles refer.
    """
    found: dict[str, dict[int, Any]] = {}
    for name in GRADIENT_HOOKS if tensor.is_leaf else ():
        if held := getattr(tensor, name, None):
            own = {number: hook for number, hook in held.items() if is_users(hook)}
            if own:
                found[name] = held if len(own) == len(held) else OrderedDict(own)
    return found


def gradient_hook_dict(tensor: Any, name: str) -> dict[int, Any]:
    """Return the dict of a leaf tensor's hooks in an attribute of `GRADIENT_HOOKS`; a new one if it has none."""
    if getattr(tensor, name) is None:
        setattr(tensor, name, OrderedDict())
    return getattr(tensor, name)


def optimizer_hooks(optimizer: Any) -> dict[str, dict[int, Any]]:
    """Return the user's hooks of an optimizer by attribute and number.

    Where these are all its hooks, the result has its own dict, to which handles refer.
    """
    found: dict[str, dict[int, Any]] = {}
    for name in OPTIMIZER_HOOKS:
        if held := vars(optimizer).get(name):
            own = {number: hook for number, hook in held.items() if is_users(hook)}
            found[name] = held if len(own) == len(held) else OrderedDict(own)
    return {name: held for name, held in found.items() if held}


def optimizer_hook_ids(optimizer: Any) -> tuple[HookId, ...]:
    """Return the identities of the user's hooks of an optimizer, valid in this process."""
    return tuple(
        (name, number, id(hook)) for name, held in optimizer_hooks(optimizer).items() for number, hook in held.items()
    )


def changed_hooks(optimizer: Any, before: Collection[HookId]) -> dict[str, dict[int, Any]] | None:
    """Return the user's hooks of an optimizer if they differ from those of ``before``; those that do not are None."""
    if optimizer_hook_ids(optimizer) == before:
        return None
    return {
        name: {number: None if (name, number, id(hook)) in before else hook for number, hook in held.items()}
        for name, held in optimizer_hooks(optimizer).items()
    }


def set_changed_hooks(optimizer: Any, hooks: Mapping[str, Mapping[int, Any]]) -> None:
    """Apply the result of `changed_hooks` to another optimizer, in its own dicts: handles refer to these."""
    for name in OPTIMIZER_HOOKS:
        held = vars(optimizer).setdefault(name, OrderedDict())
        others = {number: held[number] if hook is None else hook for number, hook in hooks.get(name, {}).items()}
        for number in [number for number, hook in held.items() if is_users(hook)]:
            del held[number]
        held.update(others)
        reserve_numbers(others)


@contextmanager
def without_hooks(optimizer: Any) -> Iterator[None]:
    """Remove the user's hooks of an optimizer inside of the block: its state is read and set for another process."""
    held = {name: dict(hooks) for name in OPTIMIZER_HOOKS if (hooks := vars(optimizer).get(name))}
    try:
        if held:
            set_changed_hooks(optimizer, {})
        yield
    finally:
        for name, hooks in held.items():
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
    """Return the methods that the user's code has replaced on an optimizer, by name."""
    found: dict[str, Any] = {}
    for name in _METHODS:
        method = vars(optimizer).get(name)
        while method is not None and is_of_engine(method):
            method = replaced_method(optimizer, name, method)
        if method is not None:
            found[name] = method
    return found


def set_own_methods(optimizer: Any, methods: Mapping[str, Any]) -> None:
    """Replace methods of an optimizer that no engine has prepared."""
    for name in _METHODS:
        if name in methods:
            setattr(optimizer, name, methods[name])
        elif name in own_methods(optimizer):
            delattr(optimizer, name)


def method_ids(optimizer: Any) -> tuple[tuple[str, int], ...]:
    """Return the identities of `own_methods`, valid in this process."""
    return tuple((name, id(getattr(item, "__func__", item))) for name, item in own_methods(optimizer).items())


def is_of_engine(method: Any) -> bool:
    """Return whether a function is defined in a package that replaces methods; ``__module__`` may be copied."""
    return getattr(method, "__globals__", {}).get("__name__", "").partition(".")[0] in _HOOKING_PACKAGES


def is_replacement(value: Any) -> bool:
    """Return whether a value is a method that an engine has set on an optimizer in place of that of its class."""
    if not (isinstance(value, types.MethodType) and is_optimizer(value.__self__) and is_of_engine(value)):
        return False
    return value.__func__ is not getattr(type(value.__self__), value.__name__, None)


def replaced_method(optimizer: Any, name: str, method: Any) -> Any:
    """Return the method that torch or an engine has replaced on an optimizer; None for that of its class."""
    inner = getattr(method, "__wrapped__", None)
    if isinstance(method, types.MethodType):
        return None if inner is getattr(type(optimizer), name) else inner
    # That of a scheduler names the function of a bound method.
    return None if inner in (None, getattr(type(optimizer), name)) else types.MethodType(inner, optimizer)


def is_hook_handle(value: Any) -> bool:
    """Return whether a value is the handle of a hook that code has registered."""
    torch = sys.modules.get("torch")
    return torch is not None and type(value) is torch.utils.hooks.RemovableHandle


def reduce_hook_handle(handle: Any) -> Any:
    """Reduce a handle; torch's own state of one whose module was freed cannot be rebuilt."""
    hooks, number, *others = handle.__getstate__()
    living = [tuple(held for held in extra if held is not None) for extra in others]
    return copyreg.__newobj__, (type(handle),), (hooks, number, *living)  # type: ignore[attr-defined]
