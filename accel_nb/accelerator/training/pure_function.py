"""Detection of pure functions: their result depends on their arguments alone, so they can be called ahead of time.

A function is judged by its bytecode and the values of its names; nothing is called. Whatever cannot be analyzed counts
as not pure.
"""

from __future__ import annotations

import builtins
import dis
import functools
import math
import types
from contextlib import suppress
from typing import Any

_CALLED = frozenset({abs, bool, divmod, float, int, len, max, min, pow, range, round, sum})
_MODULES = frozenset({"math", "numpy", "torch"})
_CHANGING = ("STORE_", "DELETE_", "IMPORT_", "MAKE_", "YIELD_", "SEND", "GET_AWAITABLE", "RETURN_GENERATOR")
_MAX_DEPTH = 4


def is_pure(function: Any, depth: int = 0) -> bool:
    """Return whether calling the function has no side effects, and returns the same value for the same arguments."""
    if isinstance(function, functools.partial):
        bound = (*function.args, *function.keywords.values())
        return all(map(_is_constant, bound)) and is_pure(function.func, depth)
    if not isinstance(function, types.FunctionType) or depth > _MAX_DEPTH:
        return False
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    if function.__code__.co_flags & _NO_FUNCTION or not all(map(_is_constant, defaults)):
        return False
    return all(_is_harmless(instruction, function, depth) for instruction in dis.get_instructions(function))


_NO_FUNCTION = 0x20 | 0x80 | 0x200
"""Flags of the code of generators and coroutines."""


def _is_harmless(instruction: dis.Instruction, function: types.FunctionType, depth: int) -> bool:
    name = instruction.opname
    if name.startswith(("LOAD_GLOBAL", "LOAD_NAME")):
        return _is_known(function.__globals__, instruction.argval, depth)
    if name.startswith(("LOAD_DEREF", "LOAD_CLASSDEREF")):
        return _is_known(_cells(function), instruction.argval, depth)
    if name.startswith(("LOAD_ATTR", "LOAD_METHOD")):
        return hasattr(math, str(instruction.argval))  # of a module that is allowed
    return name.startswith("STORE_FAST") or not name.startswith(_CHANGING)


def _is_known(names: dict[str, Any], name: str, depth: int) -> bool:
    if name not in names and not hasattr(builtins, name):
        return False
    value = names[name] if name in names else getattr(builtins, name)
    if isinstance(value, types.ModuleType):
        return value.__name__ in _MODULES
    if isinstance(value, types.BuiltinFunctionType | type):
        return value in _CALLED or getattr(math, name, None) is value
    return _is_constant(value) or is_pure(value, depth + 1)


def _cells(function: types.FunctionType) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not bound yet
            found[name] = cell.cell_contents
    return found


def _is_constant(value: Any) -> bool:
    """Return whether a value is a number, a text, None, or a list of these, although a list can change later."""
    if isinstance(value, tuple | list):
        return all(map(_is_constant, value))  # pyright: ignore[reportUnknownArgumentType]
    return value is None or type(value) in (bool, int, float, str)
