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
    reduce_batch_size_fn: Callable[[int], int] | None = None,
) -> Callable[..., Any]:
    """Decorate ``function(batch_size, ...)`` to be repeated with nine tenths of the size after an out-of-memory error.

    Raises RuntimeError if no size fits, and TypeError if a caller passes the batch size.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    wrapped = function

    @functools.wraps(wrapped)
    def run(*args: Any, **kwargs: Any) -> Any:
        if starting_batch_size < 1:
            raise RuntimeError(f"starting_batch_size is {starting_batch_size}: there is no batch size to try")
        try:
            inspect.signature(wrapped).bind(starting_batch_size, *args, **kwargs)
        except TypeError as error:
            raise TypeError(
                f"{wrapped.__name__}: {error}; the batch size is passed by the decorator, so leave it out of the call"
            ) from None
        try:
            return search(wrapped, starting_batch_size, reduce_batch_size_fn or _reduce_size)(*args, **kwargs)
        except MisuseError as error:
            raise RuntimeError(str(error)) from error

    return run


def _reduce_size(size: int) -> int:
    return size * 9 // 10
