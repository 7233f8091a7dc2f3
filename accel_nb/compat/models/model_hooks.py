"""Hooks around the forward of one module, with accelerate's names; they replace the module's ``forward``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from accel_nb.bigmodel.offload.dispatch import remove_hook_from_submodules as undo_dispatch

Module = TypeVar("Module", bound=nn.Module)


class ModelHook:
    """Base class of hooks: methods that run on addition, before and after each forward, and on removal."""

    no_grad = False
    """Whether the module's forward runs under `torch.no_grad`."""

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Run when the hook is added; return the module."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Run before each forward; return the arguments for the forward."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Run after each forward; return the output."""
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Run when the hook is removed; return the module."""
        return module


class SequentialHook(ModelHook):
    """Several hooks, each run in order."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Run every hook's `init_hook`."""
        return functools.reduce(lambda found, hook: hook.init_hook(found), self.hooks, module)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Pass each hook the arguments that the one before it has returned."""
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Pass each hook the output that the one before it has returned."""
        return functools.reduce(lambda found, hook: hook.post_forward(module, found), self.hooks, output)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Run every hook's `detach_hook`."""
        return functools.reduce(lambda found, hook: hook.detach_hook(found), self.hooks, module)


def add_hook_to_module(module: Module, hook: ModelHook, append: bool = False) -> Module:
    """Run a hook around the module's forward, in place of an existing hook or, with ``append``, after it."""
    before: ModelHook | None = getattr(module, "_hf_hook", None)
    if append and before is not None:
        remove_hook_from_module(module)
        hook = SequentialHook(before, hook)
    inner: Callable[..., Any] = module.__dict__.get("_old_forward", module.forward)
    if "_old_forward" not in module.__dict__:
        module.__dict__["_accel_nb_own_forward"] = module.__dict__.get("forward")
    module = hook.init_hook(module)  # pyright: ignore[reportAssignmentType]
    module.__dict__.update(_old_forward=inner, _hf_hook=hook)
    module.__dict__["forward"] = functools.update_wrapper(functools.partial(_forward_with_hook, module, inner), inner)
    return module


def _forward_with_hook(module: Any, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    hook: ModelHook | None = module.__dict__.get("_hf_hook")
    if hook is None:  # the hook was removed, but code that has wrapped this forward still calls it
        return inner(*args, **kwargs)
    args, kwargs = hook.pre_forward(module, *args, **kwargs)
    if hook.no_grad:
        with torch.no_grad():
            output = module._old_forward(*args, **kwargs)
    else:
        output = module._old_forward(*args, **kwargs)
    return hook.post_forward(module, output)


def remove_hook_from_module(module: Module, recurse: bool = False) -> Module:
    """Restore the module's own forward, and with ``recurse`` that of each module in it.

    With ``recurse``, the offloaded weights of a dispatched model are loaded into host memory.
    """
    if recurse:
        undo_dispatch(module)
    hook = module.__dict__.get("_hf_hook")
    if hook is not None:
        hook.detach_hook(module)
        own = module.__dict__.pop("_accel_nb_own_forward", None)
        has_forward = "_old_forward" in module.__dict__
        for name in ("_hf_hook", *(("_old_forward", "forward") if has_forward else ())):
            module.__dict__.pop(name, None)
        if own is not None:
            module.__dict__["forward"] = own
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Remove the hooks of a module and of all modules in it, and undo `dispatch_model`."""
    remove_hook_from_module(module, recurse=True)
