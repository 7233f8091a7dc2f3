"""Memory of the host in large pages: to touch a small page for the first time costs more than to fill it."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 64
"""Of each tensor, in bytes: what torch gives tensors of its own, so that kernels take the same paths."""
_PAGE_BYTES = 2 << 20
_REGION_BYTES = 256 << 20
"""Tensors that are made together share regions of about this size, each of which is freed with its last tensor."""

Layout = tuple[Sequence[int], torch.dtype]
"""A shape and a dtype."""


def empty_tensors(layouts: Sequence[Layout]) -> list[Tensor]:
    """Return tensors on the CPU with any content, in the order of their layouts; each has a storage of its own."""
    sizes = [_nbytes(shape, dtype) for shape, dtype in layouts]
    made: list[Tensor] = []
    for group in _groups(sizes):
        places = list(accumulate((aligned(sizes[at]) for at in group[:-1]), initial=0))
        total = places[-1] + sizes[group[-1]]
        region = _region(total) if total >= _PAGE_BYTES else None
        for place, (shape, dtype) in zip(places, layouts[group.start : group.stop], strict=True):
            count = _nbytes(shape, dtype) // dtype.itemsize
            if region is None or not count:
                made.append(torch.empty(tuple(shape), dtype=dtype))
            else:
                flat = torch.frombuffer(region, dtype=torch.uint8, count=count * dtype.itemsize, offset=place)
                made.append(flat.view(dtype).view(tuple(shape)))
    return made


def aligned(nbytes: int) -> int:
    """Return the size up to where the next tensor may start."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def give_back() -> None:
    """Give memory that malloc keeps for later back to the system, where the C library can."""
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
        nbytes += aligned(size)
        if nbytes >= _REGION_BYTES or at == len(sizes) - 1:
            yield range(begin, at + 1)
            begin, nbytes = at + 1, 0


def _region(nbytes: int) -> mmap.mmap:
    # Python's default is memory that forked processes share: not in large pages, and outside of limits on data.
    region = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    return region
