"""Blocks of memory in a stream of values: tensors and arrays in one block share memory on the receiving side too.

A tensor's block is its storage, an array's is that of the array that it is a view of. An array and the tensor that
`torch.from_numpy` makes of it are in one block, which is found by its address. Data in the memory of an object that the
receiver holds belongs to a `SharedBlock` of that object.
"""

from __future__ import annotations

import bisect
import operator
from pickle import PickleBuffer
from typing import Any

from accel_nb.pool.sync.objects.shared_ids import SharedObjects
from accel_nb.pool.sync.objects.shared_memory import (
    MemorySpan,
    SharedBlock,
    array_address,
    span_of_array,
    span_of_tensor,
)

_LARGE_BYTES = 2**20
"""Blocks above this size are not sent for a view of less than half of them."""


_SMALL_BYTES = 2**16
_RANGE_BITS = 18
"""Ranges of 256 KiB: few blocks are in one, and a large block is in few."""
_START = operator.itemgetter(0)


class MemoryBlock:
    """The bytes of one block; on the receiving side in a buffer of the payload."""

    def __init__(self, data: Any) -> None:
        self.data = data
        self._has_arrays = False
        self._own: Any = None
        self._storage: Any = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        return MemoryBlock, (PickleBuffer(self.data),)

    def tensor(self, dtype: str, layout: tuple[int, tuple[int, ...], tuple[int, ...]]) -> Any:
        """Return the tensor with this layout in the block; ``layout`` begins with the offset in elements."""
        import torch

        if self._storage is None:
            self._storage = self._make_storage()  # always the same storage
        return torch.empty(0, dtype=getattr(torch, dtype), device="cpu").set_(self._storage, *layout)

    def _make_storage(self) -> Any:
        import torch

        view = memoryview(self.data)
        if not view.nbytes:
            return torch.UntypedStorage(0)
        values = torch.frombuffer(view, dtype=torch.uint8)
        if view.nbytes <= _SMALL_BYTES and not self._has_arrays:
            # Memory of torch's own can be resized: some modules resize their small buffers in the first call.
            self._own = values = values.clone()
        return values.untyped_storage()

    def buffer(self) -> Any:
        """Return the block as a buffer for arrays; then torch can no longer resize it."""
        self._has_arrays = True
        return self.data if self._own is None else self._own.numpy()


class _StorageBytes:
    """The bytes of a storage, as an array that can be written to. `Tensor.numpy` would forbid resizing the storage."""

    def __init__(self, storage: Any) -> None:
        self._storage = storage
        address = storage.data_ptr(), False
        self.__array_interface__ = {"data": address, "shape": (storage.nbytes(),), "typestr": "|u1", "version": 3}

    def to_array(self) -> Any:
        """Return the array, which keeps the storage."""
        import numpy

        return numpy.asarray(self) if self._storage.nbytes() else numpy.empty(0, numpy.uint8)


class MemoryBlocks:
    """The blocks of one stream, by address. Each keeps its memory alive, so that no other gets its address."""

    def __init__(self, objects: SharedObjects) -> None:
        self._objects = objects
        # By the id of its object.
        self._shared: dict[int, SharedBlock] = {}
        # By the number of a range of addresses: the start, the stop and the block of each that is in it, by start.
        self._ranges: dict[int, list[tuple[int, int, MemoryBlock]]] = {}

    def share_tensor(self, tensor: Any) -> tuple[SharedBlock, tuple[int, tuple[int, ...], tuple[int, ...]]] | None:
        """Return the block of a tensor in the memory of an object that the receiver holds, and its place there."""
        span = span_of_tensor(tensor)
        block, offset = self._find_shared(span) if span is not None else (None, 0)
        if block is None or offset % tensor.element_size():
            return None
        return block, (offset // tensor.element_size(), tuple(tensor.size()), tensor.stride())

    def place_tensor(self, data: Any) -> tuple[MemoryBlock, tuple[int, tuple[int, ...], tuple[int, ...]]]:
        """Return the block of a tensor on the CPU, and its offset in elements, size and strides there."""
        size = data.element_size()
        start, spans = data.data_ptr(), zip(data.size(), data.stride(), strict=True)
        num_bytes = (1 + sum((length - 1) * stride for length, stride in spans)) * size if data.numel() else 0
        block, offset = self._find(start, num_bytes)
        if block is None or offset % size:
            storage = data.untyped_storage()
            if _is_small_part(data.numel() * size, storage.nbytes()):
                data = data.clone()
                storage = data.untyped_storage()
            block = self._add(storage.data_ptr(), _StorageBytes(storage).to_array())
            offset = data.storage_offset() * size
        return block, (offset // size, tuple(data.size()), data.stride())

    def place_array(self, array: Any, *, as_data: bool = False) -> tuple[Any, ...] | None:
        """Return the arguments with which `rebuild_array` makes an array; None if it has no plain bytes.

        The array is of NumPy's own class. With ``as_data`` the block is never a `SharedBlock`.
        """
        if array.dtype.hasobject or not array.nbytes:
            return None
        is_writeable = array.flags.writeable
        (first, num_bytes), before = span_of_array(array)
        block, offset = (None, 0) if as_data else self._find_shared((first, num_bytes))
        if block is None:
            block, offset = self._find(first, num_bytes)
        if block is None:
            owner = array
            while type(owner.base) is type(array):
                owner = owner.base
            is_plain = owner.flags.c_contiguous or owner.flags.f_contiguous
            if not is_plain or _is_small_part(array.nbytes, owner.nbytes):
                owner = array = array.copy()
                first, before = array_address(owner), 0
            start = array_address(owner)
            flat = (owner if owner.flags.c_contiguous else owner.T).reshape(-1)
            block, offset = self._add(start, flat.view("uint8")), first - start
        offset += before
        if is_writeable and array.flags.c_contiguous:
            return (block, array.dtype, array.shape, offset) if offset else (block, array.dtype, array.shape)
        return block, array.dtype, array.shape, offset, array.strides, is_writeable

    def _find_shared(self, span: MemorySpan) -> tuple[SharedBlock | None, int]:
        found = self._objects.find_owner(span)
        if found is None:
            return None, 0
        owner, offset = found
        if id(owner) not in self._shared:
            self._shared[id(owner)] = SharedBlock.make(owner)
        return self._shared[id(owner)], offset

    def _find(self, start: int, num_bytes: int) -> tuple[MemoryBlock | None, int]:
        """Return the block that contains these bytes, and their offset in it; None if there is none."""
        inside = self._ranges.get(start >> _RANGE_BITS, ())
        at = bisect.bisect_right(inside, start, key=_START) - 1
        if at < 0 or not num_bytes or start + num_bytes > inside[at][1]:
            return None, 0
        first, _, block = inside[at]
        return block, start - first

    def _add(self, start: int, data: Any) -> MemoryBlock:
        block = MemoryBlock(data)
        if not data.nbytes:
            return block
        stop = start + data.nbytes
        for number in range(start >> _RANGE_BITS, (stop - 1 >> _RANGE_BITS) + 1):
            bisect.insort_right(self._ranges.setdefault(number, []), (start, stop, block), key=_START)
        return block


def rebuild_array(
    block: MemoryBlock | SharedBlock,
    dtype: Any,
    shape: Any,
    offset: int = 0,
    strides: Any = None,
    is_writeable: bool = True,
) -> Any:
    """Return the array with this layout in a block."""
    import numpy

    array = numpy.ndarray(shape, dtype, block.buffer(), offset, strides)
    if not is_writeable:
        array.flags.writeable = False
    return array


def _is_small_part(num_bytes: int, num_block_bytes: int) -> bool:
    return num_block_bytes > _LARGE_BYTES and num_bytes * 2 < num_block_bytes
