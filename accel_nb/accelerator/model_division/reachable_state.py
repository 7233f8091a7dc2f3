"""Containers, attributes, global variables, tensors and arrays outside of modules that a forward pass may change.

They are reachable from the attributes of its modules, from the code of their classes, and from the user's functions
that this code names. Other models are not included.
"""

from __future__ import annotations

import dis
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from accel_nb.runtime.code_objects import nested_codes

IsUserModule = Callable[[str | None], bool]
"""Whether a module, given by its name, is the user's."""
CONTAINERS = (list, dict, set, deque)
_MAX_ITEMS = 64
"""The items of longer containers are not followed."""
_MAX_FOUND = 1024
_EMPTY_CELL = types.CellType()
_OF_TORCH = frozenset(vars(nn.Module()))
"""The attributes that torch gives each module."""


class GlobalVariables(MutableMapping[str, Any]):
    """The variables of a namespace that a function assigns, as a mapping."""

    def __init__(self, namespace: dict[str, Any], names: frozenset[str]) -> None:
        self._namespace, self._names = namespace, names

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        return self._namespace[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._namespace[name] = value

    def __delitem__(self, name: str) -> None:
        del self._namespace[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if name in self._namespace)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __copy__(self) -> dict[str, Any]:
        return dict(self)


def find_reachable(model: nn.Module, is_user_module: IsUserModule) -> Iterator[tuple[str, Any]]:
    """Yield values that a model's code may change, each with a name.

    These are containers, attributes of objects and global variables as mappings, arrays, and tensors that are neither
    parameters nor buffers of the model.
    """
    waiting = [
        (f"{name}.{key}", value)
        for name, part in model.named_modules()
        for key, value in (*vars(part).items(), *_methods(type(part), is_user_module))
        if key not in _OF_TORCH
    ]
    seen = set(map(id, model.buffers()))
    for name, value in waiting:  # grows meanwhile
        if id(value) in seen or isinstance(value, nn.Module | nn.Parameter) or len(seen) > _MAX_FOUND:
            continue
        seen.add(id(value))
        if isinstance(value, CONTAINERS) or has_values(value):
            yield name, value
        elif isinstance(value, types.FunctionType):
            if is_user_module(value.__module__) and (assigned := _assigned_globals(value)):
                yield name, GlobalVariables(value.__globals__, assigned)
        elif _is_users_object(value, is_user_module):
            yield name, vars(value)
        waiting += [(f"{name}.{key}", part) for key, part in _parts(value, is_user_module)]


def has_values(value: Any) -> bool:
    """Whether a value is a tensor or a NumPy array whose values can be copied."""
    if type(value) is Tensor:
        return value.layout is torch.strided and not value.is_meta
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray and not value.dtype.hasobject


def _methods(kind: type, is_user_module: IsUserModule) -> Iterator[tuple[str, types.FunctionType]]:
    for base in kind.__mro__:
        if is_user_module(base.__module__):
            yield from ((key, value) for key, value in vars(base).items() if isinstance(value, types.FunctionType))


def _parts(value: Any, is_user_module: IsUserModule) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from value.items() if len(value) <= _MAX_ITEMS else ()
    elif isinstance(value, list | tuple | set | deque):
        yield from enumerate(value) if len(value) <= _MAX_ITEMS else ()
    elif isinstance(value, types.FunctionType):
        if is_user_module(value.__module__):
            names = {name for code in nested_codes(value.__code__) for name in code.co_names}
            yield from ((name, value.__globals__[name]) for name in names if name in value.__globals__)
            yield from enumerate(cell.cell_contents for cell in value.__closure__ or () if cell != _EMPTY_CELL)
    elif isinstance(value, types.MethodType):
        yield from (("function", value.__func__), ("self", value.__self__))
    elif _is_users_object(value, is_user_module):
        yield from vars(value).items()
        yield from _methods(type(value), is_user_module)


def _is_users_object(value: Any, is_user_module: IsUserModule) -> bool:
    return not isinstance(value, type) and hasattr(value, "__dict__") and is_user_module(type(value).__module__)


def _assigned_globals(function: types.FunctionType) -> frozenset[str]:
    return frozenset(
        item.argval
        for code in nested_codes(function.__code__)
        for item in dis.get_instructions(code)
        if item.opname == "STORE_GLOBAL"
    )
