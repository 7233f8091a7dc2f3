"""The memory of tensors and arrays that sender and receiver both hold, and values that are views of it.

`sd = model.state_dict()`, `w = layer.weight.data` and `row = table[3]` share the memory of an object that the receiver
holds too. They are sent as that object with their place in it, and rebuilt as views of the receiver's object.
"""

from __future__ import annotations

import bisect
import operator
import sys
from collections.abc import Iterable
from typing import Any

from accel_nb.pool.sync.objects.object_kinds import is_lazy, is_tensor
from accel_nb.runtime.distributed.sharded import full_shape, is_sharded, local_shard

_START = operator.itemgetter(0)

MemorySpan = tuple[int, int]
"""The first address of a tensor or array, and the number of bytes from there to its end."""
Layout = tuple[str, tuple[int, ...], tuple[int, ...]]
"""The dtype, size and strides (in elements) of a tensor."""


class OwnData:
    """A tensor or array that is sent as data, even if the receiver holds an object with the same memory.

    It is the new content of such an object. Where it arrives it is a tensor or an array.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def data_of(value: Any) -> Any:
    """Return a value itself, also if it is `OwnData`."""
    return value.value if type(value) is OwnData else value


class SharedMemory:
    """Tensors and arrays by their memory. Of those in the same memory, the largest, or else the first, is kept."""

    def __init__(self, objects: Iterable[Any]) -> None:
        found = [(span, value) for value in objects if (span := _owned_span(value)) is not None]
        found.sort(key=lambda item: -item[0][1])
        self._spans: list[tuple[int, int, Any]] = []
        for (start, num_bytes), value in found:
            at = bisect.bisect_right(self._spans, start, key=_START)
            is_free = at == 0 or self._spans[at - 1][1] <= start
            if is_free and (at == len(self._spans) or start + num_bytes <= self._spans[at][0]):
                self._spans.insert(at, (start, start + num_bytes, value))

    def find(self, span: MemorySpan) -> tuple[Any, int] | None:
        """Return the object whose memory contains a span, and the offset there in bytes; None if there is none."""
        start, num_bytes = span
        at = bisect.bisect_right(self._spans, start, key=_START) - 1
        if at < 0 or not num_bytes or start + num_bytes > self._spans[at][1]:
            return None
        return self._spans[at][2], start - self._spans[at][0]


def span_of_tensor(tensor: Any) -> MemorySpan | None:
    """Return the span of a tensor, or of this rank's shard of a sharded one; None if it has no memory with strides."""
    torch = sys.modules["torch"]
    local = local_shard(tensor)
    if is_lazy(local) or local.layout is not torch.strided or local.is_meta or local.is_quantized or not local.numel():
        return None
    if local.is_neg():  # its memory has the negative of its values
        return None
    try:
        start = local.data_ptr()
    except RuntimeError:  # the tensor has no storage, as inside of a function transform
        return None
    if not start or local.is_contiguous():
        return (start, local.nbytes) if start else None
    spans = zip(local.size(), local.stride(), strict=True)
    return start, (1 + sum((length - 1) * stride for length, stride in spans)) * local.element_size()


def span_of_array(array: Any) -> tuple[MemorySpan, int]:
    """Return the span of an array, and how many bytes of it are before the first element."""
    start = array_address(array)
    if array.flags.contiguous:
        return (start, array.nbytes), 0
    spans = [(length - 1) * stride for length, stride in zip(array.shape, array.strides, strict=True)]
    before = -sum(span for span in spans if span < 0)  # elements of negative strides are before the first one
    return (start - before, before + sum(span for span in spans if span > 0) + array.itemsize), before


def array_address(array: Any) -> int:
    """Return the address of an array's first element; its attribute `ctypes` takes ten times as long."""
    return array.__array_interface__["data"][0]


def span_of(value: Any) -> MemorySpan | None:
    """Return the span of a tensor or array; None if it has no plain memory."""
    if is_tensor(value):
        return span_of_tensor(value)
    return span_of_array(value)[0] if value.nbytes and not value.dtype.hasobject else None


def _owned_span(value: Any) -> MemorySpan | None:
    """Return the span of a tensor or array without gaps between its elements; None for others, and for conjugates."""
    if not is_tensor(value):
        return span_of(value) if value.flags.c_contiguous else None
    span, local = span_of_tensor(value), local_shard(value)
    return span if span is not None and span[1] == local.nbytes and not local.is_conj() else None


class SharedBlock:
    """The memory of an object that the receiver holds, in place of a `MemoryBlock`."""

    def __init__(self, owner: Any, layout: Layout | None) -> None:
        self._owner = owner
        self._layout = layout

    @classmethod
    def make(cls, owner: Any) -> SharedBlock:
        """Return the block of a tensor or array, with its layout here."""
        is_whole = is_tensor(owner) and not is_sharded(owner)
        return cls(owner, layout_of(owner) if is_whole else None)

    def is_like(self, tensor: Any) -> bool:
        """Return whether a sharded tensor has the type and the size of the object."""
        return is_sharded(self._owner) and full_shape(self._owner) == full_shape(tensor)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return SharedBlock, (self._owner, self._layout)

    def tensor(self, dtype: str, layout: tuple[int, tuple[int, ...], tuple[int, ...]]) -> Any:
        """Return the tensor with this layout in the block; ``layout`` begins with the offset in elements."""
        torch = sys.modules["torch"]
        kind, (offset, size, strides) = getattr(torch, dtype), layout
        if not is_tensor(self._owner):
            return torch.from_numpy(self._bytes()).view(kind).as_strided(size, strides, offset)
        own = self._owner.detach()
        if offset == 0 and own.dtype is kind and tuple(own.shape) == tuple(size):
            return own
        self._require_layout(own)
        storage = own.untyped_storage()
        start = own.storage_offset() * own.element_size() // kind.itemsize
        return torch.empty(0, dtype=kind, device=own.device).set_(storage, start + offset, size, strides)

    def buffer(self) -> Any:
        """Return the block as a buffer for arrays."""
        if not is_tensor(self._owner):
            return self._bytes()
        own = self._owner.detach()
        self._require_layout(own)
        if not own.is_cpu:
            raise ValueError(f"it is an array that shares memory with a tensor, which the receiver has on {own.device}")
        torch = sys.modules["torch"]
        storage, start = own.untyped_storage(), own.storage_offset() * own.element_size()
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, start, (own.nbytes,), (1,)).numpy()

    def _bytes(self) -> Any:
        return self._owner.reshape(-1).view("uint8")

    def _require_layout(self, own: Any) -> None:
        if is_sharded(own) or self._layout is None or layout_of(own) != self._layout:
            raise ValueError("it is a view of a tensor that the receiver has sharded, or in another layout")


def layout_of(tensor: Any) -> Layout:
    """Return the layout of a tensor."""
    return str(tensor.dtype), tuple(tensor.size()), tuple(tensor.stride())
