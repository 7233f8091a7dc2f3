"""Allocation of host memory in huge pages: with small pages, page faults take longer than filling the memory."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 64
"""Alignment of tensors in bytes, the same as in torch's own allocations, so that kernels choose the same code."""
_PAGE_BYTES = 2 << 20
_REGION_BYTES = 256 << 20
"""Tensors allocated together share regions of about this size; a region is freed with its last tensor."""

TensorLayout = tuple[Sequence[int], torch.dtype]
"""A shape and a dtype."""


def empty_tensors(layouts: Sequence[TensorLayout]) -> list[Tensor]:
    """Return uninitialized CPU tensors in the order of their layouts; each has a separate storage."""
    sizes = [_nbytes(shape, dtype) for shape, dtype in layouts]
    made: list[Tensor] = []
    for group in _groups(sizes):
        places = list(accumulate((align_up(sizes[at]) for at in group[:-1]), initial=0))
        total = places[-1] + sizes[group[-1]]
        region = _region(total) if total >= _PAGE_BYTES else None
        for place, (shape, dtype) in zip(places, layouts[group.start : group.stop], strict=True):
            count = _nbytes(shape, dtype) // dtype.itemsize
            if region is None or not count:
                made.append(torch.empty(tuple(shape), dtype=dtype, device="cpu"))
            else:
                flat = torch.frombuffer(region, dtype=torch.uint8, count=count * dtype.itemsize, offset=place)
                made.append(flat.view(dtype).view(tuple(shape)))
    return made


def align_up(nbytes: int) -> int:
    """Return a size rounded up to `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def trim_heap() -> None:
    """Return free memory of malloc to the system, if the C library has ``malloc_trim``."""
    trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _nbytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    count = 1
    for dim in shape:
        count *= dim
    return count * dtype.itemsize


def _groups(sizes: Sequence[int]) -> Iterator[range]:
    begin, nbytes = 0, 0
    for at, size in enumerate(sizes):
        nbytes += align_up(size)
        if nbytes >= _REGION_BYTES or at == len(sizes) - 1:
            yield range(begin, at + 1)
            begin, nbytes = at + 1, 0


def _region(nbytes: int) -> mmap.mmap:
    # Python's default is MAP_SHARED, which has no huge pages and does not count towards RLIMIT_DATA.
    region = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # some kernels have no huge pages
            region.madvise(mmap.MADV_HUGEPAGE)
    return region
