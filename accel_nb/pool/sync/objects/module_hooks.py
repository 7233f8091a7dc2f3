"""The user's hooks of modules and parameters: a cell or the notebook registers and removes them in the same dicts.

Weight and spectral norm of `torch.nn.utils` are the user's hooks too: functions of torch add and remove them.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from accel_nb.pool.sync.objects.user_hooks import (
    defining_module,
    gradient_hook_dict,
    gradient_hooks,
    is_from_user,
    reserve_numbers,
)

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""The attributes in which a module has its hooks, by the numbers of their handles."""
FLAGS = {
    "_forward_hooks_with_kwargs": "_forward_hooks",
    "_forward_hooks_always_called": "_forward_hooks",
    "_forward_pre_hooks_with_kwargs": "_forward_pre_hooks",
}
"""Attributes with the numbers of hooks that are called in another way, each with the attribute that has these hooks."""
_IS_FULL_BACKWARD = "_is_full_backward_hook"

HookKey = tuple[str, str, int]
"""The path of a submodule or parameter, the attribute that has the hook, and its number."""


def module_hooks(module: Any) -> Iterator[tuple[HookKey, Any]]:
    """Yield the user's hooks of a module, its submodules and its parameters."""
    for path, part in module.named_modules():
        own = vars(part)
        for name in HOOKS:
            if hook_dict := own.get(name):
                yield from (((path, name, number), hook) for number, hook in hook_dict.items() if _is_from_user(hook))
    for path, value in module.named_parameters():
        for name, hook_dict in gradient_hooks(value).items():
            yield from (((path, name, number), hook) for number, hook in hook_dict.items())


def module_hook_ids(module: Any) -> dict[HookKey, int]:
    """Return the identities of the user's hooks of a module, valid in this process."""
    return {key: id(hook) for key, hook in module_hooks(module)}


def changed_module_hooks(module: Any, before: Mapping[HookKey, int]) -> dict[str, dict[str, Any]]:
    """Return the user's hooks of a module by path and attribute, with None in place of those in ``before``."""
    known = {(name, number, identity) for (_, name, number), identity in before.items()}
    found: dict[str, dict[str, Any]] = {}
    for (path, name, number), hook in module_hooks(module):
        is_known = (name, number, id(hook)) in known
        found.setdefault(path, {}).setdefault(name, {})[number] = None if is_known else hook
    for path, part in module.named_modules():
        if (hooks := found.get(path)) is None:
            continue
        own = vars(part)
        for name, holder in FLAGS.items():
            hooks[name] = {number: True for number in own.get(name, ()) if number in hooks.get(holder, ())}
        hooks[_IS_FULL_BACKWARD] = own.get(_IS_FULL_BACKWARD)
    return found


def set_changed_module_hooks(module: Any, hooks: Mapping[str, Mapping[str, Any]]) -> None:
    """Apply the result of `changed_module_hooks` to another module, in its own dicts: handles refer to these."""
    for path, part in module.named_modules():
        sent, own = hooks.get(path, {}), vars(part)
        users = {name: [number for number, hook in own[name].items() if _is_from_user(hook)] for name in HOOKS}
        for name, holder in FLAGS.items():
            _replace(own[name], users[holder], sent.get(name, {}))
        for name in HOOKS:
            hook_dict = own[name]
            new_hooks = {
                number: hook_dict.get(number) if hook is None else hook for number, hook in sent.get(name, {}).items()
            }
            _replace(hook_dict, users[name], new_hooks)
            reserve_numbers(new_hooks)
        if _IS_FULL_BACKWARD in sent:
            own[_IS_FULL_BACKWARD] = sent[_IS_FULL_BACKWARD]
    for path, value in module.named_parameters():
        sent, own = hooks.get(path, {}), gradient_hooks(value)
        for name in own.keys() | sent.keys():
            hook_dict = gradient_hook_dict(value, name)
            new_hooks = {
                number: hook_dict.get(number) if hook is None else hook for number, hook in sent.get(name, {}).items()
            }
            _replace(hook_dict, list(own.get(name, ())), new_hooks)
            reserve_numbers(new_hooks)


def _replace(hook_dict: dict[int, Any], numbers: Collection[int], new_hooks: Mapping[int, Any]) -> None:
    for number in numbers:
        hook_dict.pop(number, None)
    hook_dict.update({number: item for number, item in new_hooks.items() if item is not None})


def _is_from_user(hook: Any) -> bool:
    # torch wraps a `load_state_dict` hook; a pickled wrapper loses the hook's ``__module__``.
    while isinstance(hook, functools.partial) or type(hook).__name__ == "_WrappedHook":
        hook = hook.func if isinstance(hook, functools.partial) else hook.hook
    return defining_module(hook).startswith("torch.nn.utils.") or is_from_user(hook)
