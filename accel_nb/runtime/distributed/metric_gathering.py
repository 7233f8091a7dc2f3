"""Checks of library and user code whether torch.distributed is in use, and their results in plain cells.

If every rank reads whole batches, each has the metric of all samples already: gathering would count every sample once
for each rank, and a rate that is scaled by the number of processes would be too high. The same is true of the
statistics of ``nn.SyncBatchNorm``, which computes on GPUs only where torch.distributed is in use. And where every rank
writes its own version of a file and reads it again, a library that writes on rank 0 alone must not skip the others.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

METRIC_LIBRARIES = ("ignite", "monai", "torchmetrics", "vector_quantize_pytorch")
"""Libraries that gather metrics, or statistics of a batch, if torch.distributed is available and initialized."""
_ASKING_MODULE, _SAVING_MODULE = "transformers.distributed.utils", "transformers.distributed.mixin"
"""The module of transformers with the check, and the module that decides by it which ranks save a model."""
_NORMS = "torch.nn.modules.batchnorm"


def replacements(
    gathers: Callable[[], bool], is_user_module: Callable[[str], bool], writes_once: Callable[[], bool]
) -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
    """Yield the functions to replace, so that torch.distributed is in use only where ``gathers()`` returns True.

    This applies to libraries of metrics, to batch normalization, and to the modules for whose names ``is_user_module``
    returns True. To code that saves on rank 0 it is not in use where ``writes_once()`` returns True.
    """
    for name in ("is_available", "is_initialized"):
        yield dist, name, functools.partial(_wrap, gathers, is_user_module, writes_once)


def _wrap(
    gathers: Callable[[], bool],
    is_user_module: Callable[[str], bool],
    writes_once: Callable[[], bool],
    original: Callable[[], bool],
) -> Callable[[], bool]:
    @functools.wraps(original)
    def is_in_use() -> bool:
        if torch.compiler.is_compiling():  # which cannot compile a look at the caller
            return original()
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if not original():
            return False
        if caller == _ASKING_MODULE and sys._getframe(2).f_globals.get("__name__") == _SAVING_MODULE:
            return not writes_once()
        is_alone = caller == _NORMS or caller.partition(".")[0] in METRIC_LIBRARIES or is_user_module(caller)
        return not is_alone or gathers()

    is_in_use.inspects_caller = True  # type: ignore[attr-defined]
    return is_in_use
