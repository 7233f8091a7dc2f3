"""Detection of loops that train: whether the code that iterates a loader leads to a backward pass.

A loop that only counts samples must read all of them, even if a cell has trained on the same loader before. Where the
code cannot be analyzed, the loop counts as not training: every rank then reads every batch, which is slower and gives
the same result.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections import ChainMap
from collections.abc import Collection, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

from accel_nb.runtime.code_objects import nested_codes
from accel_nb.runtime.process.user_code import is_user_module

_TRAINING_NAMES = frozenset({"backward", "manual_backward"})
_GRADIENT_NAMES = frozenset({"grad"})
_MAX_CODES = 500
_MAX_DEPTH = 3
_METHODS = (types.MethodType, staticmethod, classmethod)
_PARTIAL = (functools.partial, functools.partialmethod)
_SKIPPED_MODULES = ("accel_nb.", "torch.utils.data.")


@dataclass(frozen=True, slots=True)
class TrainingCode:
    """Code that iterates a loader and leads to a backward pass, with the variables in its scope."""

    code: types.CodeType
    scope: Mapping[str, Any]

    def reads_gradients(self) -> bool:
        """Return whether the code, or a function of the user that it calls, may read or change ``parameter.grad``."""
        return _mentions(self.code, self.scope, _GRADIENT_NAMES)


def find_training_code() -> TrainingCode | None:
    """Return the calling code that iterates a loader, if it leads to a backward pass; else None.

    If the calling code is a generator, its callers receive the batches, so they are searched too.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith(_SKIPPED_MODULES):
            scope = ChainMap(frame.f_locals, frame.f_globals)
            if _mentions(frame.f_code, scope, _TRAINING_NAMES):
                return TrainingCode(frame.f_code, scope)
            if not frame.f_code.co_flags & inspect.CO_GENERATOR:
                return None
        frame = frame.f_back
    return None


def _mentions(code: types.CodeType, scope: Mapping[str, Any], wanted: Set[str]) -> bool:
    """Return whether code, or a function of the user that it calls by a name in ``scope``, has a name of ``wanted``."""
    seen: set[types.CodeType] = set()
    queue = [(code, scope)]
    for part, names in queue:
        if part in seen or len(seen) > _MAX_CODES:
            continue
        seen.add(part)
        mentioned = set(_names_in(part))
        if mentioned & wanted:
            return True
        queue += [
            (function.__code__, ChainMap(_closure(function), function.__globals__))
            for name in mentioned
            if name in names
            for function in _functions_of(names[name], mentioned)
        ]
    return False


def _names_in(code: types.CodeType) -> Iterator[str]:
    for part in nested_codes(code):
        yield from part.co_names
        yield from part.co_varnames
        yield from part.co_freevars


def _functions_of(value: Any, mentioned: Collection[str], depth: int = 0) -> Iterator[types.FunctionType]:
    """Yield the user's functions that a value provides: itself, or its methods and attributes in ``mentioned``."""
    # Not by ``getattr`` with a default: the user's ``__getattr__`` may raise any error.
    function = value.__func__ if isinstance(value, _METHODS) else value.func if isinstance(value, _PARTIAL) else value
    if isinstance(function, types.FunctionType):
        if is_user_module(function.__module__):
            yield function
        if isinstance(value, types.MethodType) and depth < _MAX_DEPTH:
            yield from _functions_of(value.__self__, mentioned, depth + 1)
        return
    kind, called = (value, "__init__") if isinstance(value, type) else (type(value), "__call__")
    for base in kind.__mro__:
        if is_user_module(base.__module__):
            methods = (vars(base).get(name) for name in {*mentioned, called})
            yield from (method for method in methods if isinstance(method, types.FunctionType))
    if depth < _MAX_DEPTH and is_user_module(kind.__module__):
        attributes = getattr(value, "__dict__", {})
        for part in [attributes[name] for name in mentioned if name in attributes]:
            yield from _functions_of(part, mentioned, depth + 1)


def _closure(function: types.FunctionType) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:
            continue  # not bound yet, so not called either
    return found
