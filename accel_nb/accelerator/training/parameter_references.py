"""Update of references to parameters outside of models, such as in a list, after a strategy has replaced these."""

from __future__ import annotations

import functools
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from accel_nb.runtime.container_items import items_of
from accel_nb.runtime.distributed.sharded import ParameterMemory, memory_layout, record_replaced
from accel_nb.runtime.process.user_code import is_user_module, warn_at_user_line

_MAX_DEPTH = 8
_MAX_CONTAINER = 4096
_REPLACED_BY_STRATEGY = {*vars(nn.Module()), "param_groups", "state"}
"""Attributes of modules and optimizers whose parameters the strategy itself replaces."""


class ParameterReferences:
    """Updates a namespace's references to parameters outside of models whenever a strategy has replaced these.

    References to tensors in states of optimizers are updated too. A number that is the id of a replaced tensor becomes
    the id of its replacement. The search includes containers, functions, and the attributes of modules and of objects
    and classes of the user. Tuples and weak references are replaced by new ones, everything else is changed in place.
    """

    def __init__(self, namespace: Callable[[], dict[str, Any]]) -> None:
        self._namespace = namespace
        # By the new tensor: the tensor that shared memory with a parameter, and the parameter's replacement.
        self._views = WeakIdKeyDictionary()

    def replace(self, changed: Mapping[int, Tensor], memory: ParameterMemory) -> None:
        """Replace parameters by id, and tensors with all of a parameter's ``memory``, such as state dict values."""
        _Replacement(changed, memory, self._views).replace_items(self._namespace(), 0)


class _Replacement:
    """One replacement, in which each object is visited once."""

    def __init__(self, changed: Mapping[int, Tensor], memory: ParameterMemory, views: Any) -> None:
        self._changed = changed
        self._memory, self._views = memory, views
        self._storages = {storage for storage, *_ in memory}
        self._has_warned = False
        # By id, each object that was visited (a reference keeps its id in use), and its replacement.
        self._seen: dict[int, tuple[Any, Any]] = {}

    def replace_items(self, mapping: dict[Any, Any], depth: int) -> None:
        """Replace values and keys of a dict."""
        keys = {key: self._replace(key, depth) for key in mapping if isinstance(key, Tensor) or type(key) is int}
        if any(new is not key for key, new in keys.items()):
            items = [(keys.get(key, key), value) for key, value in mapping.items()]
            # An OrderedDict records the order of its keys itself.
            kind: Any = OrderedDict if isinstance(mapping, OrderedDict) else dict
            kind.clear(mapping)
            for key, value in items:
                kind.__setitem__(mapping, key, value)
        for key, value in list(mapping.items()):
            new = self._replace(value, depth + 1)
            if new is not value:
                dict.__setitem__(mapping, key, new)

    def _replace(self, value: Any, depth: int) -> Any:
        if type(value) is int:  # as in `if id(parameter) in ignored`
            return id(self._changed[value]) if value in self._changed else value
        if isinstance(value, Tensor):
            return self._changed[id(value)] if id(value) in self._changed else self._view(value)
        if id(value) not in self._seen and depth < _MAX_DEPTH:
            self._seen[id(value)] = value, value
            self._seen[id(value)] = value, self._replace_parts(value, depth)
        return self._seen.get(id(value), (value, value))[1]

    def _view(self, value: Tensor) -> Tensor:
        """Return the replacement of a tensor that shares a parameter's memory.

        Any other tensor is returned unchanged.
        """
        if value in self._views:
            view, parameter = self._views[value]
            whole = self._changed.get(id(parameter))
            if whole is None:
                return value
            view.data = whole.detach()
            record_replaced(value, view)
            return view
        layout = memory_layout(value) if self._memory else None
        if layout is None or layout[0] not in self._storages:
            return value
        if layout not in self._memory:
            self._warn_of_part(value)
            return value
        _, parameter = self._memory[layout]
        part = parameter.detach()
        self._views[part] = value, parameter
        record_replaced(value, part)
        return part

    def _warn_of_part(self, value: Tensor) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        warn_at_user_line(
            f"a tensor of shape {tuple(value.shape)} that was made before this cell is in the memory of a shard of a "
            "parameter, which the strategy has divided among the workers: it keeps the old values. Make the tensor "
            "where it is used, or train with `--strategy ddp`"
        )

    def _replace_parts(self, value: Any, depth: int) -> Any:
        if isinstance(value, list | deque | tuple | set | frozenset | dict):
            return self._replace_in_container(value, depth)
        if type(value) is weakref.ref:
            held = value()
            new = self._replace(held, depth)
            return value if new is held else weakref.ref(new, value.__callback__)
        if isinstance(value, types.FunctionType):
            if is_user_module(value.__module__):
                self._replace_in_function(value, depth)
        elif isinstance(value, types.MethodType):
            self._replace(value.__self__, depth + 1)
        elif isinstance(value, functools.partial):
            arguments = self._replace(value.args, depth + 1)
            self.replace_items(value.keywords, depth)
            if arguments is not value.args:
                held: Any = value
                held.__setstate__((value.func, arguments, value.keywords, vars(value) or None))
            self._replace(value.func, depth + 1)
        elif isinstance(value, nn.Module):
            for part in value.modules():
                self._replace_attributes(part, depth)
        else:
            self._replace_attributes(value, depth)
        return value

    def _replace_in_container(self, value: Any, depth: int) -> Any:
        items = items_of(value, _MAX_CONTAINER)
        if isinstance(value, dict):
            if items:
                self.replace_items(value, depth)
            return value
        new = [self._replace(item, depth + 1) for item in items]
        if all(one is other for one, other in zip(items, new, strict=True)):
            return value
        if isinstance(value, tuple | frozenset):
            make = getattr(value, "_make", type(value))  # the constructor of a named tuple
            return make(new)
        if isinstance(value, set):
            value.clear()
            value.update(new)
        else:
            for index, item in enumerate(new):
                value[index] = item
        return value

    def _replace_in_function(self, function: types.FunctionType, depth: int) -> None:
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # the cell is empty
                held = cell.cell_contents
                new = self._replace(held, depth + 1)
                if new is not held:
                    cell.cell_contents = new
        defaults = self._replace(function.__defaults__, depth + 1)
        if defaults is not function.__defaults__:
            function.__defaults__ = defaults
        for mapping in (function.__kwdefaults__, vars(function)):
            self.replace_items(mapping or {}, depth)

    def _replace_attributes(self, holder: Any, depth: int) -> None:
        kind = holder if isinstance(holder, type) else type(holder)
        if not is_user_module(kind.__module__):
            return
        names = [
            name
            for name in _attribute_names(holder)
            if name not in _REPLACED_BY_STRATEGY or not _is_module_or_optimizer(holder)
        ]
        for name in names if len(names) <= _MAX_CONTAINER else ():
            with suppress(AttributeError):  # a slot without a value
                held = vars(holder)[name] if name in getattr(holder, "__dict__", {}) else getattr(holder, name)
                new = self._replace(held, depth + 1)
                if new is held:
                    continue
                if isinstance(holder, type):
                    setattr(holder, name, new)
                else:
                    object.__setattr__(holder, name, new)


def _is_module_or_optimizer(holder: Any) -> bool:
    return isinstance(holder, nn.Module | Optimizer)


def _attribute_names(holder: Any) -> Iterable[str]:
    """Return the names of an object's own attributes, in its dict or in slots; for a class, of its data attributes."""
    if isinstance(holder, type):
        return [name for name in vars(holder) if not (name.startswith("__") and name.endswith("__"))]
    slots = [
        name
        for kind in type(holder).__mro__
        for name, member in vars(kind).items()
        if isinstance(member, types.MemberDescriptorType) and is_user_module(kind.__module__)
    ]
    return [*getattr(holder, "__dict__", {}), *slots]
