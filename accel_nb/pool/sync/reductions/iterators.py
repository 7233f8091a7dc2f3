"""Generators and iterators of loaders in a pickle stream, as long as nothing has been read from them.

A generator that has not started is sent as its function and the arguments. An iterator of a loader without worker
processes refers to such a generator. The position of any other cannot be copied: it continues where it is.
"""

from __future__ import annotations

import types
from typing import Any

from accel_nb.runtime.python_generators import call_arguments, function_of, has_not_started

WAS_READ = "was read there, where the next cell on the workers continues; that of the notebook is where it was"
"""Why an iterator that kernel and workers share is no longer the same on both."""


def is_generator_iterator(value: Any) -> bool:
    """Return whether a value is a generator that a Python function or expression has returned."""
    return isinstance(value, types.GeneratorType)


def reduce_generator_iterator(generator: Any) -> Any:
    """Reduce a generator that has not started, or that has ended. Raise TypeError for any other."""
    if generator.gi_frame is None:
        return _ended, ()
    if not has_not_started(generator):
        raise TypeError("it has yielded values already, and where it is cannot be copied")
    positional, named = call_arguments(generator)
    return _call, (function_of(generator), positional, named)


def _call(function: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
    return function(*positional, **named)


def _ended() -> Any:
    generator = (item for item in ())
    generator.close()
    return generator


def is_loader_iterator(value: Any) -> bool:
    """Return whether a value is torch's iterator over a loader."""
    return is_iterator(value) and type(value).__module__ == "torch.utils.data.dataloader"


def reduce_loader_iterator(iterator: Any) -> Any:
    """Reduce an iterator of a loader to its attributes; those of one with worker processes cannot be copied."""
    return object.__new__, (type(iterator),), vars(iterator)


def is_iterator(value: Any) -> bool:
    """Return whether a value is an object that is read by `next`."""
    return hasattr(type(value), "__next__")


def is_plain_iterator(value: Any) -> bool:
    """Return whether a value is one of Python's own iterators, as of a list, of `zip` and of `itertools`."""
    is_of_python = is_iterator(value) and type(value).__module__ in ("builtins", "itertools")
    return is_of_python and not is_generator_iterator(value)
