"""The threads that torch computes with on a CPU: between two operations they spin, on cores that others could use."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

_SOFT = 1
"""``omp_pause_soft`` of OpenMP 5.0: threads may go, settings stay."""


def rest() -> None:
    """End the threads that wait for the calling thread's next operation, which starts them again.

    They spin for milliseconds, which is as long as a block takes to be copied; to start them takes some microseconds
    each. Does nothing where torch computes without OpenMP.
    """
    pause = _pause()
    if pause is not None:
        pause()


@functools.cache
def _pause() -> Callable[[], object] | None:
    try:
        runtime: Any = ctypes.CDLL(None)  # torch loads its OpenMP for everybody
        pause, host = runtime.omp_pause_resource, runtime.omp_get_initial_device()
    except (OSError, TypeError, AttributeError):
        return None
    return functools.partial(pause, _SOFT, host)
