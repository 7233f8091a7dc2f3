"""Marking of tensor reads that accel_nb itself makes while a model computes.

Observers of the reads of a model's code skip them.
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
    """Return whether the current read is one of accel_nb's own."""
    return _is_own.get()
