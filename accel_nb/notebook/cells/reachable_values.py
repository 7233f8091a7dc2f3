"""The values that a value of the notebook refers to: code that a cell may run without naming it. Runs no user code."""

from __future__ import annotations

import functools
import gc
import itertools
import types
import weakref
from collections import ChainMap, OrderedDict, UserDict, deque
from collections.abc import Iterable, Iterator
from typing import Any

from accel_nb.pool.sync.objects.object_kinds import attributes_of, is_tensor
from accel_nb.runtime.python_generators import generator_values

_MAX_ITEMS = 64
"""Containers with more items are treated as data."""
_MAX_VALUES = 20_000
_ATOMS = (int, float, complex, str, bytes, type(None), types.ModuleType, types.BuiltinFunctionType)
_CONTAINER_KINDS = (dict, list, tuple, set, frozenset, deque)
_LIBRARY_MAPPINGS = (UserDict, ChainMap, weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
_CONTAINERS = (dict, OrderedDict, list, set)
_PARTS = ("_modules", "_parameters")
"""Attributes of torch's modules that hold their parts by name."""
_FUNCTIONS = (
    "transform", "target_transform", "transforms", "loader", "collate_fn", "lr_lambdas",
    "dataset", "datasets", "data_source", "sampler", "batch_sampler",
)  # fmt: skip
"""Attributes in which objects of libraries store functions and other objects that call the notebook's code."""


def reachable_values(values: Iterable[Any], seen: set[int] | None = None) -> Iterator[Any]:
    """Yield values and what they refer to, each once: items, attributes, closures, submodules, and hooks.

    Of a library's object these are followed: the parts and hooks of a module, and the attributes that hold functions,
    datasets, samplers, functions of the notebook or objects of its classes, directly or in a container. Values whose
    ids are in ``seen`` are left out, and new ones are added.
    """
    seen = set() if seen is None else seen
    waiting = list(values)
    while waiting and len(seen) < _MAX_VALUES:
        value = waiting.pop()
        if isinstance(value, _ATOMS) or id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        waiting.extend(_referred_by(value))


def notebook_classes(value: Any) -> Iterator[type]:
    """Yield the classes of the notebook that a value is an instance of, or that a class is derived from or made by."""
    kind = value if isinstance(value, type) else type(value)
    metaclass: Any = type(kind)
    yield from (base for base in (*kind.__mro__, *metaclass.__mro__) if base.__module__ == "__main__")


def first_items(value: Any, num: int) -> list[Any]:
    """Return the first items of one of Python's containers, or values of a dict; none for others. Runs no user code.

    Other mappings may compute their values, as one of files that it loads.
    """
    if isinstance(value, dict):
        items: Iterable[Any] = dict[Any, Any].values(value)
    else:
        kind: Any = next((kind for kind in _CONTAINER_KINDS if isinstance(value, kind)), tuple)
        items = kind.__iter__(value) if isinstance(value, kind) else ()
    return list(itertools.islice(items, num))


def _referred_by(value: Any) -> Iterator[Any]:
    if isinstance(value, types.FunctionType):
        if value.__module__ == "__main__" or "<" in value.__qualname__:
            yield from (cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell))
            yield from (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *vars(value).values())
    elif isinstance(value, types.MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.GeneratorType):
        yield from generator_values(value).values()
    elif isinstance(value, types.MappingProxyType):
        yield from gc.get_referents(value)
    elif type(value) in _LIBRARY_MAPPINGS:
        yield from value.values() if len(value) <= _MAX_ITEMS else ()
    elif isinstance(value, _CONTAINER_KINDS):
        items = first_items(value, _MAX_ITEMS + 1)
        yield from items if len(items) <= _MAX_ITEMS else ()
    elif not isinstance(value, type):
        yield from _attributes(value)


def _attributes(value: Any) -> Iterator[Any]:
    own = attributes_of(value) or {}
    for name in _PARTS:
        parts = own.get(name)
        yield from parts.values() if isinstance(parts, dict) else ()
    is_of_notebook = type(value).__module__ == "__main__"
    for name, item in own.items():
        if name in _PARTS:
            continue
        if type(item) in _CONTAINERS and not item:  # as nearly all dicts of hooks: a model has thousands
            continue
        if is_of_notebook or name in _FUNCTIONS or name.endswith("_hooks") or _is_of_notebook(item):
            yield item
        elif type(item) in _CONTAINER_KINDS:
            items = first_items(item, _MAX_ITEMS + 1)
            yield from filter(_is_of_notebook, items if len(items) <= _MAX_ITEMS else ())
    if is_tensor(value):  # its hooks are no entries of its ``__dict__``
        yield from (hooks for hooks in (value._backward_hooks, value._post_accumulate_grad_hooks) if hooks)


def _is_of_notebook(value: Any) -> bool:
    """Return whether a value is a function of the notebook, a partial one, or an object of one of its classes."""
    kind = type(value)
    if kind is types.FunctionType or kind is types.MethodType:
        return value.__module__ == "__main__"
    return kind.__module__ == "__main__" or kind is functools.partial


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
