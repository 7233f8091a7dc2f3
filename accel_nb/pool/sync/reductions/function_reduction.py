"""Functions of cells in a pickle stream: their globals are the receiver's namespace, and closures stay shared."""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

import cloudpickle


def is_code(value: Any) -> bool:
    """Return whether a value is a code object."""
    return isinstance(value, types.CodeType)


def reduce_code(code: types.CodeType) -> Any:
    """Reduce a code object with the name of its cell, which cloudpickle leaves out since 3.1.3."""
    reduced: Any = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    return _rebuild_code, (reduced[1], code.co_filename)


def _rebuild_code(arguments: tuple[Any, ...], filename: str) -> types.CodeType:
    return types.CodeType(*arguments).replace(co_filename=filename)


def is_closure_cell(value: Any) -> bool:
    """Return whether a value is a variable that a function shares with another one."""
    return isinstance(value, types.CellType)


def reduce_closure_cell(cell: types.CellType) -> Any:
    """Reduce a closure cell; it is created empty and then filled, as it may contain its own function."""
    try:
        state = (cell.cell_contents,)
    except ValueError:  # the closure cell is empty
        state = None
    return types.CellType, (), state, None, None, _set_closure_cell


def _set_closure_cell(cell: types.CellType, state: tuple[Any]) -> None:
    cell.cell_contents = state[0]


def is_cached_function(value: Any) -> bool:
    """Return whether a value is a function of a cell with an ``lru_cache``, which pickle would look up by name."""
    return isinstance(value, functools._lru_cache_wrapper) and value.__module__ == "__main__"


def reduce_cached_function(function: Any) -> Any:
    """Reduce a function that has an ``lru_cache`` to one with an empty cache."""
    own = {name: value for name, value in vars(function).items() if name not in ("__wrapped__", "cache_parameters")}
    return _rebuild_cached, (function.__wrapped__, function.cache_parameters(), own)


def _rebuild_cached(function: Any, parameters: dict[str, Any], attributes: dict[str, Any]) -> Any:
    made = functools.lru_cache(**parameters)(function)
    vars(made).update(attributes)
    return made


def is_cached_property(value: Any) -> bool:
    """Return whether a value is a ``functools.cached_property``, which has a lock up to Python 3.11."""
    return type(value) is functools.cached_property


def reduce_cached_property(value: Any) -> Any:
    """Reduce a cached property to its function and name."""
    return functools.cached_property, (value.func,), {"attrname": value.attrname}


def _main_namespace() -> dict[str, Any]:
    """Return the namespace of cells in this process."""
    return sys.modules["__main__"].__dict__


class NamespaceReference(dict[str, Any]):
    """Placeholder for the namespace of cells while a function's globals are pickled."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _main_namespace, ()


def is_of_ipython(value: Any) -> bool:
    """Return whether a function is defined in IPython, whatever its ``__module__`` and ``__name__`` are."""
    return getattr(value, "__globals__", {}).get("__package__") == "IPython.core"


class ModuleNamespaceReference(dict[str, Any]):
    """Placeholder for the namespace of an imported module while the globals of a function are pickled."""

    def __init__(self, module: types.ModuleType) -> None:
        super().__init__({"__name__": module.__name__})
        self._module = module

    def __reduce_ex__(self, protocol: Any) -> Any:
        return vars, (self._module,)


def module_of(namespace: dict[str, Any]) -> types.ModuleType | None:
    """Return the module with this namespace, if other processes can import it."""
    module = sys.modules.get(str(namespace.get("__name__")))
    is_importable = (
        module is not None and module.__name__ != "__main__" and getattr(module, "__spec__", None) is not None
    )
    return module if is_importable and vars(module) is namespace else None


def set_function_state(function: types.FunctionType, state: Any) -> None:
    """Set a function's state; globals that the receiver has already are not overwritten."""
    attributes, slots = state
    missing = {name: value for name, value in slots["__globals__"].items() if name not in function.__globals__}
    cloudpickle.cloudpickle._function_setstate(function, (attributes, {**slots, "__globals__": missing}))


def with_binding(reduced: Any) -> Any:
    """Extend the reduction of a function or class by a step that binds its name in the receiving namespace."""
    if not isinstance(reduced, tuple) or len(reduced) < 6 or reduced[5] is None:
        return reduced
    make, arguments, state, list_items, dict_items, set_state = reduced
    return make, arguments, (set_state, state), list_items, dict_items, _set_state_and_bind


def _set_state_and_bind(value: Any, state: tuple[Any, Any]) -> None:
    set_state, own = state
    set_state(value, own)
    _main_namespace()[value.__qualname__] = value
