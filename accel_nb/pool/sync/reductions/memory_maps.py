"""Arrays that NumPy maps from files: the receiver maps the same file.

Ranks > 0 get a copy of an array that can be written, since each rank of a plain cell writes to it: an update of one
rank must not be read by another. Rank 0 writes to the file, and the notebook maps that file.
"""

from __future__ import annotations

import mmap
import os
import sys
from typing import Any

from accel_nb.runtime.process.environment import get_variable


def is_memory_map(value: Any) -> bool:
    """Return whether the value is an array of ``numpy.memmap``."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.memmap


def reduce_memory_map(array: Any, *, omits_data: bool) -> Any:
    """Reduce an array to its place in its file, with a copy of its data if it can be written.

    The copy is left out with ``omits_data``. Return NotImplemented for an array that is not one block of a file:
    it is sent as data.
    """
    numpy = sys.modules["numpy"]
    whole = array
    while isinstance(whole.base, numpy.ndarray):
        whole = whole.base
    is_mapped = isinstance(whole, numpy.memmap) and isinstance(whole.base, mmap.mmap)
    is_block = array.size > 0 and (array.flags.c_contiguous or array.flags.f_contiguous)
    # "c" is for changes that the file does not get.
    if not (is_mapped and is_block) or whole.mode == "c" or not os.path.exists(whole.filename):
        return NotImplemented
    offset = whole.offset + array.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
    order = "C" if array.flags.c_contiguous else "F"
    mode = "r" if whole.mode == "r" else "r+"
    data = None if mode == "r" or omits_data else numpy.array(array, order=order)
    return _rebuild, (os.fspath(whole.filename), array.dtype, mode, offset, array.shape, order, data)


def _rebuild(path: str, dtype: Any, mode: Any, offset: int, shape: tuple[int, ...], order: Any, data: Any) -> Any:
    import numpy

    if data is not None and get_variable("RANK", "0") != "0":
        return data.view(numpy.memmap)
    return numpy.memmap(path, dtype, mode, offset, shape, order)
