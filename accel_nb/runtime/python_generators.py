"""Inspection of Python generators: their function, and the values that they reference. Runs no user code."""

from __future__ import annotations

import gc
import inspect
import sys
import types
from typing import Any


def has_not_started(generator: types.GeneratorType[Any, Any, Any]) -> bool:
    """Return whether a generator has not started, so that its function and arguments determine it."""
    return inspect.getgeneratorstate(generator) == inspect.GEN_CREATED


def generator_values(generator: types.GeneratorType[Any, Any, Any]) -> dict[str, Any]:
    """Return the variables of a generator by name; before it has started they are its arguments and its closure's."""
    return {} if generator.gi_frame is None else dict(generator.gi_frame.f_locals)


def argument_values(generator: types.GeneratorType[Any, Any, Any]) -> dict[str, Any]:
    """Return the arguments and closure variables of a generator by name, without its local variables."""
    code, values = generator.gi_code, generator_values(generator)
    flags = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    names = (*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + flags], *code.co_freevars)
    return {name: values[name] for name in names if name in values}


def function_of(generator: types.GeneratorType[Any, Any, Any]) -> types.FunctionType:
    """Return the function that returned a generator, or an equal one. Raise TypeError if it is not known."""
    code = generator.gi_code
    for item in gc.get_referents(generator):
        if isinstance(item, types.FunctionType) and item.__code__ is code:
            return item
    # In Python 3.10 a generator does not refer to its function.
    assert generator.gi_frame is not None, "an ended generator has no function"
    variables = generator.gi_frame.f_globals
    found: Any = sys.modules.get(variables["__name__"])
    for name in generator.__qualname__.split("."):
        found = getattr(found, name, None)
    if getattr(found, "__code__", None) is code:
        return found
    if code.co_freevars:
        raise TypeError(f"the function {generator.__qualname__} is not known")
    return types.FunctionType(code, variables, generator.__name__)


def call_arguments(generator: types.GeneratorType[Any, Any, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with which the function of a generator that has not started was called."""
    code, values = generator.gi_code, generator_values(generator)
    names = list(code.co_varnames)
    positional = tuple(values[name] for name in names[: code.co_argcount])
    named_end = code.co_argcount + code.co_kwonlyargcount
    named = {name: values[name] for name in names[code.co_argcount : named_end]}
    if code.co_flags & inspect.CO_VARARGS:
        positional += tuple(values[names[named_end]])
        named_end += 1
    if code.co_flags & inspect.CO_VARKEYWORDS:
        named |= values[names[named_end]]
    return positional, named
