"""Optimizers and schedulers in a pickle stream, with what torch leaves out: attributes, hooks and replaced methods."""

from __future__ import annotations

import copyreg
import types
from typing import Any

from accel_nb.pool.sync.objects.user_attributes import OPTIMIZER_PREFIXES
from accel_nb.pool.sync.objects.user_hooks import optimizer_hooks, own_methods, replaced_method, reserve_numbers


def reduce_scheduler(scheduler: Any) -> Any:
    """Reduce a scheduler without a ``step`` attribute of the instance, which is valid in one process only."""
    _, (kind, *_), state, *rest = scheduler.__reduce_ex__(5)
    state = {name: value for name, value in state.items() if name != "step"}
    # For ``__newobj__`` only, pickle compares the class with the object's: a prepared scheduler has another class.
    return copyreg._reconstructor, (kind, object, None), state, *rest  # type: ignore[attr-defined]


def reduce_optimizer(optimizer: Any) -> Any:
    """Reduce an optimizer with attributes that torch leaves out, such as those of LBFGS."""
    make, arguments, state, *rest = optimizer.__reduce_ex__(5)
    if make is copyreg.__newobj__ and len(arguments) == 1:  # type: ignore[attr-defined]
        make = _new_optimizer
    own = {
        name: value
        for name, value in vars(optimizer).items()
        if name not in (*state, "step", "zero_grad") and not name.startswith(OPTIMIZER_PREFIXES)
    }
    users = {**own_methods(optimizer), **optimizer_hooks(optimizer)}
    state = {name: value for name, value in state.items() if not is_property(type(optimizer), name)}
    reduced = make, arguments, {**state, **own, **users}, *rest, None, None
    return *reduced[:5], _set_optimizer_state


def _new_optimizer(kind: Any) -> Any:
    """Return an optimizer without state. torch wraps the ``step`` of its class here, as the state may refer to that."""
    import torch

    optimizer = kind.__new__(kind)
    if not is_property(kind, "defaults"):
        torch.optim.Optimizer.__setstate__(optimizer, {"defaults": {}})
    return optimizer


def is_property(kind: Any, name: str) -> bool:
    """Return whether a class of optimizers reads an attribute from another optimizer, which it wraps."""
    return isinstance(getattr(kind, name, None), property)


def reduce_replacement(method: types.MethodType) -> Any:
    """Reduce a method that a training library has set on an optimizer to the method that it has replaced."""
    optimizer = method.__self__
    original = replaced_method(optimizer, method.__name__, method)
    if original is None:
        return types.MethodType, (getattr(type(optimizer), method.__name__), optimizer)
    return _identity, (original,)


def _identity(value: Any) -> Any:
    return value


def _set_optimizer_state(optimizer: Any, state: dict[str, Any]) -> None:
    vars(optimizer).update(state)  # properties of a wrapper, which torch reads next, may need its attributes
    optimizer.__setstate__(state)
    for hook_dict in optimizer_hooks(optimizer).values():
        reserve_numbers(hook_dict)
