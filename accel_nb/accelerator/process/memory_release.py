"""Release of unused memory, and detection of out-of-memory errors."""

from __future__ import annotations

import gc
from typing import Any

import torch

from accel_nb.errors import error_text
from accel_nb.runtime.devices.registry import available_types

_OUT_OF_MEMORY = (
    "out of memory",  # CUDA, HIP, XPU and MPS
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
)


def release_memory(*objects: Any) -> list[None]:
    """Collect garbage and free the device's cached memory; return a None for each object.

    Write ``model, optimizer = release_memory(model, optimizer)``: an object that a name references cannot be freed.
    """
    num_objects = len(objects)
    del objects
    free_cached_memory()
    return [None] * num_objects


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the device or the machine had no memory left when an error was raised, by its type and message."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in error_text(error) for text in _OUT_OF_MEMORY)


def free_cached_memory() -> None:
    """Collect garbage, and release the cached memory of the device's allocator."""
    gc.collect()
    for kind in available_types():
        kind.empty_cache()
