"""Caches of functions, which are not sent, and detection of results in them whose loss has an effect.

A function with a cache is sent without its results. The other process computes them again, which is the same unless a
result was changed since, as a model is that is trained.
"""

from __future__ import annotations

import functools
import gc
import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

from accel_nb.pool.sync.contents.plain_objects import is_plain_object
from accel_nb.pool.sync.objects.class_attributes import is_notebook_class
from accel_nb.pool.sync.objects.object_kinds import is_tensor, is_training_object


def cached_functions(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a named function with a cache, or those of a class of the notebook or of its objects, by readable names."""
    if isinstance(value, functools._lru_cache_wrapper):
        yield name, value
        return
    kind = value if isinstance(value, type) else type(value)
    if is_notebook_class(kind):
        for own, item in vars(kind).items():
            if isinstance(item, functools._lru_cache_wrapper):
                yield f"{name}.{own}", item


def has_changeable_results(function: Any) -> bool:
    """Return whether the cache of a function has results that code can change: models, containers, plain objects."""
    return any(_is_changeable(result) for result in _results(function))


def _is_changeable(result: Any) -> bool:
    if isinstance(result, tuple):
        return any(_is_changeable(item) for item in result)
    if is_tensor(result):
        return result.requires_grad
    return (
        is_training_object(result)
        or isinstance(result, list | dict | set | deque | bytearray)
        or is_plain_object(result)
    )


def _results(function: Any) -> list[Any]:
    """Return the results in a function's cache.

    The function refers to a dict of them, or, if their number is limited, to each one before the class of its entry.
    """
    referents = gc.get_referents(function)
    if function.cache_parameters()["maxsize"] is None:
        return list(next(item for item in referents if type(item) is dict and item is not vars(function)).values())
    is_class = [isinstance(item, type) and item.__module__ == "functools" for item in referents]
    return list(itertools.compress(referents, is_class[1:]))
