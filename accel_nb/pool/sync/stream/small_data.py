"""Checksums of small arrays and tensors, used in fingerprints in place of their reductions.

A dataset may be a list of tens of thousands of them, and to reduce a tensor takes six times as long.
"""

from __future__ import annotations

import ctypes
import struct
import sys
import zlib
from typing import Any

from accel_nb.pool.sync.objects.object_kinds import is_plain_array
from accel_nb.pool.sync.objects.shared_ids import SharedObjects
from accel_nb.pool.sync.objects.shared_memory import MemorySpan, array_address, span_of_array, span_of_tensor
from accel_nb.pool.sync.objects.user_attributes import tensor_attributes
from accel_nb.runtime.distributed.sharded import is_sharded

_MAX_BYTES = 2**16
_PLAIN_KINDS = "biufc"
"""The kinds of dtypes of arrays whose elements are numbers."""

_CHECKSUM = struct.Struct("<cIIQq")
"""``v`` (view) or ``c`` (content), the layout, the sum of the content, the base or storage, and the offset in it."""

_Data = tuple[tuple[Any, ...], MemorySpan, int]
"""The layout of an array or tensor, its span of memory, and the address at which its base or storage starts."""


class Checksums:
    """The checksums of one stream, which are equal if the content, and the memory that objects share, are equal.

    That of a view of an object in ``shared`` consists of the object's id and the offset in it, without the content.
    """

    def __init__(self, shared: SharedObjects) -> None:
        self._shared = shared
        # By id: the value, which keeps the id and the memory, and its number.
        self._seen: dict[int, tuple[Any, int]] = {}
        self._layouts: dict[tuple[Any, ...], int] = {}
        self._memory: dict[int, int] = {}
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        # The types of the values of which some have a checksum.
        self.types = frozenset(([numpy.ndarray] if numpy else []) + ([torch.Tensor] if torch else []))

    def of(self, value: Any) -> bytes | tuple[Any, ...] | None:
        """Return the checksum of an array or tensor; None if its reduction is more than its layout and its bytes."""
        if (seen := self._seen.get(id(value))) is not None:
            return b"again%d" % seen[1]
        found = _describe_array(value) if is_plain_array(value) else _describe_tensor(value)
        if found is None:
            return None
        self._seen[id(value)] = value, len(self._seen)
        layout, (address, num_bytes), start = found
        is_new = layout not in self._layouts
        number = self._layouts.setdefault(layout, len(self._layouts))
        owner = self._shared.find_owner((address, num_bytes)) if self._shared.owners else None
        if owner is not None:
            checksum = _CHECKSUM.pack(b"v", number, 0, id(owner[0]), owner[1])
        else:
            code = zlib.crc32((ctypes.c_char * num_bytes).from_address(address))
            memory = self._memory.setdefault(start, len(self._memory))
            checksum = _CHECKSUM.pack(b"c", number, code, memory, address - start)
        return (str(layout), checksum) if is_new else checksum


def _describe_array(array: Any) -> _Data | None:
    flags, dtype, owner = array.flags, array.dtype, array
    if not flags.c_contiguous or dtype.kind not in _PLAIN_KINDS or not 0 < array.nbytes <= _MAX_BYTES:
        return None
    while type(owner.base) is type(array):
        owner = owner.base
    span, _ = span_of_array(array)
    return (dtype.str, array.shape, flags.writeable), span, span[0] if owner is array else array_address(owner)


def _describe_tensor(tensor: Any) -> _Data | None:
    if tensor.requires_grad or not tensor.is_cpu or tensor.grad is not None:
        return None
    if is_sharded(tensor) or tensor_attributes(tensor):
        return None
    span = span_of_tensor(tensor)
    if span is None or span[1] > _MAX_BYTES or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    return (tensor.dtype, tuple(tensor.shape)), span, tensor.untyped_storage().data_ptr()
