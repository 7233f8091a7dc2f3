"""Objects outside of a model's modules that its code can reach: containers, variables, tensors and generators.

They are reachable from the attributes of its modules, from the code of their classes, and from the user's functions
that this code names. Other models are not searched.
"""

from __future__ import annotations

import argparse
import dis
import functools
import sys
import types
from collections import deque
from collections.abc import Collection, Iterable, Iterator, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from accel_nb.accelerator.model_division.random_generators import is_generator
from accel_nb.runtime.code_objects import nested_codes
from accel_nb.runtime.container_items import items_of
from accel_nb.runtime.leaf_tensors import is_leaf
from accel_nb.runtime.process.user_code import is_user_module
from accel_nb.runtime.tensors.instance_patching import is_of_instance, replaced_forward

CONTAINERS = (list, dict, set, deque)
_MAX_ITEMS = 64
"""The items of longer containers are not followed."""
_MAX_FOUND = 4096
PLAIN_TYPES = (bool, int, float, str, bytes, type(None))
_LIBRARY_STATE_TYPES = (bool, float, types.FunctionType, types.BuiltinFunctionType)
"""Types of attributes of a library's layer that may change (rates, flags, functions); integers and strings do not."""
_NAMESPACES = (argparse.Namespace, types.SimpleNamespace)
"""Objects of the standard library that hold the user's values."""
_EMPTY_CELL = types.CellType()
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""The attributes that torch gives each module."""


class Reachable(NamedTuple):
    """A value that a model's code may change."""

    name: str
    value: Any
    is_user_code: bool
    """Whether it belongs to the user's code, not to a module of a library."""


class _Variables(MutableMapping[str, Any]):
    """Some variables of a namespace, as a mapping; ``copy.copy`` returns a dict."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if name in self)

    def __contains__(self, name: object) -> bool:
        try:
            self[name]  # pyright: ignore[reportArgumentType]
        except KeyError:
            return False
        return True

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __copy__(self) -> dict[str, Any]:
        return dict(self)


class GlobalVariables(_Variables):
    """Some global variables of a function."""

    def __init__(self, namespace: dict[str, Any], names: Iterable[str]) -> None:
        super().__init__(names)
        self._namespace = namespace

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        return self._namespace[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._namespace[name] = value

    def __delitem__(self, name: str) -> None:
        del self._namespace[name]


class ClosureVariables(_Variables):
    """The variables of enclosing functions that a function uses."""

    def __init__(self, function: types.FunctionType) -> None:
        self._cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        super().__init__(self._cells)

    def __getitem__(self, name: str) -> Any:
        if self._cells[name] == _EMPTY_CELL:
            raise KeyError(name)
        return self._cells[name].cell_contents

    def __setitem__(self, name: str, value: Any) -> None:
        self._cells[name].cell_contents = value

    def __delitem__(self, name: str) -> None:
        del self._cells[name].cell_contents


class ClassAttributes(_Variables):
    """The attributes of a class that are neither functions nor descriptors."""

    def __init__(self, kind: type) -> None:
        self._kind = kind
        super().__init__(
            key for key, value in vars(kind).items() if not (key.startswith("__") or hasattr(type(value), "__get__"))
        )

    def __getitem__(self, name: str) -> Any:
        return vars(self._kind)[name]

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._kind, name, value)

    def __delitem__(self, name: str) -> None:
        delattr(self._kind, name)


class SlotAttributes(_Variables):
    """The attributes of an object whose class has ``__slots__``."""

    def __init__(self, value: Any) -> None:
        self._value = value
        super().__init__(
            key
            for base in type(value).__mro__
            for key, member in vars(base).items()
            if isinstance(member, types.MemberDescriptorType)
        )

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        try:
            return object.__getattribute__(self._value, name)
        except AttributeError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self._value, name, value)

    def __delitem__(self, name: str) -> None:
        object.__delattr__(self._value, name)


def find_reachable(model: nn.Module) -> Iterator[Reachable]:
    """Yield values that a model's code may change.

    These are containers, attributes of objects, classes and functions, variables as mappings, arrays, generators, and
    tensors that are neither parameters nor buffers of the model.
    """
    own = set(map(id, model.buffers()))
    for found in _walk(model):
        name, value, is_user_code = found
        if isinstance(value, nn.Module | nn.Parameter) or id(value) in own:
            continue
        if isinstance(value, (*CONTAINERS, _Variables)) or has_values(value) or is_generator(value):
            yield found
        elif _is_user_function(value):
            if assigned := _names_of(value.__code__).assigned:
                yield Reachable(name, GlobalVariables(value.__globals__, assigned), is_user_code)
            if value.__closure__:
                yield Reachable(name, ClosureVariables(value), is_user_code)
            if vars(value):
                yield Reachable(name, vars(value), is_user_code)
        elif _is_user_object(value):
            yield Reachable(name, _attributes_of(value), is_user_code)


class PlainSource(NamedTuple):
    """A container, and the keys of its values that a model's code may read, plain ones and others."""

    container: Any
    keys: Collection[Any]
    is_complete: bool = True
    """Whether the code may also read values that are added to the container later."""


def find_plain_sources(model: nn.Module) -> Iterator[PlainSource]:
    """Yield the containers of values that a model's code may read."""
    for part in model.modules():
        is_user_code = is_user_module(type(part).__module__)
        keys = [key for key, value in vars(part).items() if is_user_code or isinstance(value, _LIBRARY_STATE_TYPES)]
        yield PlainSource(vars(part), [key for key in keys if _may_change(key)])
    for _, value, is_user_code in _walk(model):
        if not is_user_code:
            continue
        if isinstance(value, dict | _Variables):
            yield PlainSource(value, list(value) if len(value) <= _MAX_ITEMS else ())
        elif isinstance(value, list | deque):
            yield PlainSource(value, range(len(value)) if len(value) <= _MAX_ITEMS else ())
        elif isinstance(value, set):
            yield PlainSource(value, ())
        elif _is_user_function(value):
            names = [name for name in _names_of(value.__code__).read if name in value.__globals__]
            yield PlainSource(value.__globals__, names, is_complete=False)
            variables = ClosureVariables(value)
            yield PlainSource(variables, list(variables))
            yield PlainSource(vars(value), list(vars(value)))
        elif _is_user_object(value):
            attributes = _attributes_of(value)
            yield PlainSource(attributes, list(attributes))


def is_searched(value: Any) -> bool:
    """Return whether the values in an object are among those that a model's code may read."""
    return isinstance(value, CONTAINERS) or _is_user_object(value)


def _may_change(name: str) -> bool:
    return name not in _MODULE_ATTRIBUTES or name == "training"


def find_trained_outside(model: nn.Module) -> str | None:
    """Return the name of a trained module or tensor that a model's code uses but the model does not contain, if any."""
    parameters, modules = set(map(id, model.parameters())), set(map(id, model.modules()))
    for name, value, _ in _walk(model):
        if isinstance(value, nn.Module):
            if id(value) not in modules and _has_trained_state(value):
                return name
        elif isinstance(value, Tensor) and value.requires_grad and is_leaf(value) and id(value) not in parameters:
            return name
    return None


def _has_trained_state(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters()) or any(
        isinstance(part, _BatchNorm) and part.training for part in module.modules()
    )


def _walk(model: nn.Module) -> Iterator[Reachable]:
    """Yield each value that is reachable from a model's attributes and code."""
    waiting = [
        Reachable(f"{name}.{key}".lstrip("."), value, is_user_module(type(part).__module__))
        for name, part in model.named_modules()
        for key, value in (*vars(part).items(), *_class_parts(type(part)))
        if key not in _MODULE_ATTRIBUTES
    ]
    seen: set[int] = set()
    for name, value, is_user_code_part in waiting:  # the loop appends to it
        if isinstance(value, PLAIN_TYPES) or id(value) in seen or len(seen) > _MAX_FOUND:
            continue
        seen.add(id(value))
        is_user_code = is_user_code_part or _is_user_function(value) or _is_user_object(value)
        yield Reachable(name, value, is_user_code)
        if not isinstance(value, nn.Module | nn.Parameter):
            waiting += [Reachable(f"{name}.{key}", part, is_user_code) for key, part in _parts(value)]


def has_values(value: Any) -> bool:
    """Return whether a value is a tensor or a NumPy array whose values can be copied."""
    if type(value) is Tensor:
        return value.layout is torch.strided and not (value.is_meta or value.is_nested)
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray and not value.dtype.hasobject


def _class_parts(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the user's functions of a class and its bases, and the attributes of these classes as mappings."""
    for base in kind.__mro__:
        if is_of_instance(base):  # its functions are this package's, and refer to the model
            if (forward := replaced_forward(base)) is not None:
                yield "forward", forward
        elif is_user_module(base.__module__):
            yield from ((key, value) for key, value in vars(base).items() if isinstance(value, types.FunctionType))
            if attributes := ClassAttributes(base):
                yield base.__name__, attributes
        elif base not in (object, nn.Module):  # code may have replaced methods of a library's class
            yield from ((key, value) for key, value in vars(base).items() if _is_user_function(value))


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict | _Variables):
        yield from list(value.items()) if len(value) <= _MAX_ITEMS else ()
    elif isinstance(value, list | tuple | set | deque):
        yield from enumerate(items_of(value, _MAX_ITEMS))
    elif _is_user_function(value):
        names = _names_of(value.__code__).read
        yield from ((name, value.__globals__[name]) for name in names if name in value.__globals__)
        yield from ClosureVariables(value).items()
    elif isinstance(value, types.MethodType):
        yield from (("function", value.__func__), ("self", value.__self__))
    elif isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, type):
        if is_user_module(value.__module__):
            yield from _class_parts(value)
    elif _is_user_object(value):
        yield from _attributes_of(value).items()
        yield from _class_parts(type(value))


def _is_user_function(value: Any) -> bool:
    return isinstance(value, types.FunctionType) and is_user_module(value.__module__)


def _is_user_object(value: Any) -> bool:
    if isinstance(value, _NAMESPACES):
        return True
    return not isinstance(value, type) and is_user_module(type(value).__module__)


def _attributes_of(value: Any) -> MutableMapping[str, Any]:
    # Not by ``hasattr``: the user's ``__getattr__`` may raise any error.
    return vars(value) if type(value).__dictoffset__ else SlotAttributes(value)


class _Names(NamedTuple):
    """The global names of a code object."""

    read: frozenset[str]
    assigned: frozenset[str]


@functools.lru_cache(maxsize=1024)
def _names_of(code: types.CodeType) -> _Names:
    found = [
        (item.opname, item.argval)
        for part in nested_codes(code)
        for item in dis.get_instructions(part)
        if item.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL")
    ]
    return _Names(
        frozenset(name for operation, name in found if operation != "STORE_GLOBAL"),
        frozenset(name for operation, name in found if operation == "STORE_GLOBAL"),
    )
