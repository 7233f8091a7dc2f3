"""The calls of a model's blocks: the tensor that a block gets from the previous one, and hooks on calls."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from accel_nb.runtime.process.user_code import is_user_module

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""The attributes of a module with the hooks on its calls."""
_PACKAGE = ("accel_nb.", "torch.distributed.fsdp.")


def chain_input(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the tensor that a block gets from the previous block: its first argument."""
    if args:
        return args[0] if isinstance(args[0], Tensor) else None
    return next((value for value in kwargs.values() if isinstance(value, Tensor)), None)


def with_chain_input(
    args: Sequence[Any], kwargs: Mapping[str, Any], value: Tensor
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the arguments of a block with another tensor in place of `chain_input`."""
    if args:
        return (value, *args[1:]), kwargs
    name = next(name for name, item in kwargs.items() if isinstance(item, Tensor))
    return args, {**kwargs, name: value}


class CallHooks:
    """The hooks on calls of some modules, which could read or change values, except hooks of wrappers.

    Hooks of the library that defines a module's class are included if ``includes_library_hooks`` is set.
    """

    def __init__(self, modules: Iterable[nn.Module], *, includes_library_hooks: bool = False) -> None:
        modules = list(modules)
        self._held = [getattr(part, name) for part in modules for name in HOOKS]
        names = () if includes_library_hooks else {type(part).__module__ for part in modules}
        self._libraries = tuple(
            f"{name.partition('.')[0]}." for name in names if not (is_user_module(name) or name.startswith("torch."))
        )

    def exist(self) -> bool:
        """Return whether there are hooks now."""
        return any(self._held) and any(self._counts(hook) for hooks in self._held for hook in hooks.values())

    def _counts(self, hook: Any) -> bool:
        while isinstance(hook, functools.partial):
            hook = hook.func
        return not str(getattr(hook, "__module__", "")).startswith((*_PACKAGE, *self._libraries))


def inside(module: nn.Module) -> list[nn.Module]:
    """Return the modules inside of a module."""
    return [part for part in module.modules() if part is not module]


LATE_HOOK = (
    "a hook was registered inside of a {kind} after this was divided among workers, and would get parts of values: "
    "register hooks before the first cell that trains the model, or train with --{option} 1"
)
