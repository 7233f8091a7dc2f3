"""The search for a batch size, with accelerate's sequence of sizes and its errors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from accel_nb.accelerator.training.batch_size import find_executable_batch_size as search
from accel_nb.errors import MisuseError


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Callable[..., Any]:
    """Decorate ``function(batch_size, ...)`` to be repeated with a smaller size after an out-of-memory error.

    ``reduce_batch_size_fn`` has no arguments and returns the next size, by default nine tenths of the last one. A later
    call begins with the size of the one before it. Raises RuntimeError if no size fits, and TypeError if a caller
    passes the batch size.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    wrapped, size = function, starting_batch_size

    def attempt(batch_size: int, *args: Any, **kwargs: Any) -> Any:
        nonlocal size
        size = batch_size
        return wrapped(batch_size, *args, **kwargs)

    def next_size(size: int) -> int:
        return size * 9 // 10 if reduce_batch_size_fn is None else reduce_batch_size_fn()

    attempt.__name__ = getattr(wrapped, "__name__", type(wrapped).__name__)

    @functools.wraps(wrapped)
    def run(*args: Any, **kwargs: Any) -> Any:
        if starting_batch_size < 1:
            raise RuntimeError(f"starting_batch_size is {starting_batch_size}: there is no batch size to try")
        try:
            inspect.signature(wrapped).bind(size, *args, **kwargs)
        except TypeError as error:
            raise TypeError(
                f"{attempt.__name__}: {error}; the batch size is passed by the decorator, so leave it out of the call"
            ) from None
        try:
            return search(attempt, size, next_size)(*args, **kwargs)
        except MisuseError as error:
            raise RuntimeError(str(error)) from error

    return run
