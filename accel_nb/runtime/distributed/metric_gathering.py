"""Metrics of libraries that gather their states from all ranks by themselves, as those of torchmetrics do.

Such a library gathers wherever torch.distributed is in use. If every rank reads whole batches, each has the metric of
all samples already, and gathering would count every sample once for each rank.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

METRIC_LIBRARIES = ("torchmetrics",)
"""Libraries that gather if torch.distributed is available and initialized."""


def replacements(gathers: Callable[[], bool]) -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
    """Yield the functions to replace, so that libraries of metrics gather only where ``gathers()`` returns True."""
    yield dist, "is_available", functools.partial(_wrap_is_available, gathers)


def _wrap_is_available(gathers: Callable[[], bool], plain: Callable[[], bool]) -> Callable[[], bool]:
    @functools.wraps(plain)
    def is_available() -> bool:
        if torch.compiler.is_compiling():  # which cannot compile a look at the caller
            return plain()
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return plain() and (caller.partition(".")[0] not in METRIC_LIBRARIES or gathers())

    return is_available
