"""Locks of threads, which objects of the user hold: the receiver makes its own, since its threads are others."""

from __future__ import annotations

import threading
from typing import Any

_KINDS = {type(threading.Lock()): threading.Lock, type(threading.RLock()): threading.RLock}


def is_lock(value: Any) -> bool:
    """Return whether a value is a lock of Python's threads."""
    return type(value) in _KINDS


def reduce_lock(lock: Any) -> tuple[Any, ...]:
    """Reduce a lock that is not held to a new lock. Raise TypeError if another thread holds it."""
    if not lock.acquire(blocking=False):
        raise TypeError("a thread of this process holds the lock: wait for the thread before the cell")
    lock.release()
    return _KINDS[type(lock)], ()
