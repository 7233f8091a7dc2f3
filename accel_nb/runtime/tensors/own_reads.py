"""Marking of the reads of tensors' values that accel_nb itself makes while a model computes.

Code that observes what a model's code reads leaves them out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_is_own: ContextVar[bool] = ContextVar("is_own", default=False)


@contextmanager
def own_reads() -> Iterator[None]:
    """Mark the reads in the block as accel_nb's own."""
    token = _is_own.set(True)
    try:
        yield
    finally:
        _is_own.reset(token)


def is_own_read() -> bool:
    """Return whether accel_nb itself reads now."""
    return _is_own.get()
