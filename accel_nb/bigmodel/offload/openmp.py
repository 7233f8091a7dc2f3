"""Pausing of torch's OpenMP threads, which spin on their cores between two operations."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

_SOFT = 1
"""``omp_pause_soft`` of OpenMP 5.0: threads may end, settings are retained."""


def end_idle_threads() -> None:
    """End the OpenMP threads that wait for the calling thread's next operation, which restarts them.

    They spin for milliseconds, as long as copying a block takes; a restart takes some microseconds per thread. Does
    nothing where torch computes without OpenMP.
    """
    pause = _pause()
    if pause is not None:
        pause()


@functools.cache
def _pause() -> Callable[[], object] | None:
    try:
        runtime: Any = ctypes.CDLL(None)  # torch loads its OpenMP with global symbols
        pause, host = runtime.omp_pause_resource, runtime.omp_get_initial_device()
    except (OSError, TypeError, AttributeError):
        return None
    return functools.partial(pause, _SOFT, host)
