"""Dispatched loading: rank 0 reads the batches and sends each rank its share by a scatter.

A step is one scatter. Rank 0 has a buffer for each rank, with the tensors of its share, other values as JSON, and the
structure of the batch if it has changed since the last step. Buffers keep their length until a share does not fit; then
a step is two scatters, the first with the new length.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from accel_nb.data.index_distribution import DataShard
from accel_nb.data.order import BatchShare
from accel_nb.data.prefetch import BatchAndShare
from accel_nb.errors import MisuseError
from accel_nb.runtime.devices.registry import device_type

_END, _BATCH, _LENGTH, _ERROR = range(4)
_ALIGN = 16
_HEADER_BYTES = 32  # kind, a number, bytes of the values, bytes of the layout
_FIRST_LENGTH = 1024
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_ADVICE = "collate_fn must return tensors, numbers, text, lists, tuples and dicts; or set dispatch_batches to False"

Steps = Callable[[Sequence[int]], Iterator[list[BatchAndShare]]]
"""Reads on rank 0: the argument is the indices of all shares; each step yields a (batch, share) pair for each."""


def receive_dispatched(shard: DataShard, steps: Steps, device: torch.device) -> Iterator[BatchAndShare]:
    """Yield this rank's share of the batches that rank 0 reads; ``steps`` is called on rank 0 only.

    Every rank must iterate. A read error on rank 0 is raised on every rank. Batches have plain containers on every
    rank: a mapping becomes a dict.
    """
    index_of = [int(row) for row in shard.comm.all_gather(torch.tensor([shard.index], device="cpu"))]
    receiver = _Receiver(shard, device)
    if shard.comm.world.rank > 0:
        yield from iter(receiver.receive, None)
        return
    sender = _Sender(index_of, shard.count, receiver)
    reading = steps(range(shard.count))
    while True:
        try:
            pairs = next(reading, None)
            packed = [] if pairs is None else [_pack(batch, share) for batch, share in pairs]
        except Exception as error:
            sender.fail(error)
            raise
        if pairs is None:
            sender.end()
            return
        pairs.clear()
        yield sender.send(packed)


@dataclass
class _Packed:
    """A serialized share."""

    layout: list[Any]  # the share, the containers, and dtype, shape and offset of each tensor
    values: bytes
    tensors: list[Tensor]
    num_bytes: int


class _Receiver:
    """Receives this rank's shares; on rank 0 the methods get the buffers to scatter."""

    def __init__(self, shard: DataShard, device: torch.device) -> None:
        self.length = _FIRST_LENGTH
        self._comm = shard.comm
        self._device = device if device_type(device).in_collectives else torch.device("cpu")
        self._layout: list[Any] = []

    def scatter(self, buffers: Sequence[Tensor] | None) -> Tensor:
        """Return the buffer that rank 0 sends to this rank."""
        return self._comm.scatter(torch.empty(self.length, dtype=torch.uint8, device=self._device), buffers, 0)

    def receive(self, buffers: Sequence[Tensor] | None = None) -> BatchAndShare | None:
        """Return this rank's share of the next step; None at the end."""
        content = self.scatter(buffers)
        kind, number, values_length, layout_length = _numbers(content)
        if kind == _LENGTH:
            self.length = number
            return self.receive(None)
        if kind == _END:
            return None
        start = _HEADER_BYTES + values_length
        if kind == _ERROR:
            raise MisuseError(
                "rank 0, which reads for all ranks (dispatch_batches), failed: "
                + bytes(content[_HEADER_BYTES:start].tolist()).decode(errors="replace")
            )
        if layout_length:
            self._layout = json.loads(bytes(content[start : start + layout_length].tolist()))
        values = json.loads(bytes(content[_HEADER_BYTES:start].tolist())) if values_length else []
        share, tree, tensors = self._layout
        base = _aligned(start + layout_length)
        return _rebuild(tree, [_view(content, base, *tensor) for tensor in tensors], values), BatchShare(*share)


class _Sender:
    """Sends the shares, on rank 0."""

    def __init__(self, index_of: list[int], count: int, receiver: _Receiver) -> None:
        self._index_of = index_of
        self._receiver = receiver
        self._layouts: list[Any] = [None] * count
        self._buffers = self._new_buffers()

    def send(self, packed: list[_Packed]) -> BatchAndShare:
        """Send each rank the share of its index, and return rank 0's own."""
        layouts = [
            b"" if share.layout == known else json.dumps(share.layout).encode()
            for share, known in zip(packed, self._layouts, strict=True)
        ]
        self._layouts = [share.layout for share in packed]
        needed = max(
            _aligned(_HEADER_BYTES + len(share.values) + len(layout)) + share.num_bytes
            for share, layout in zip(packed, layouts, strict=True)
        )
        length = self._receiver.length
        if needed > length or (needed < length // 8 and length > _FIRST_LENGTH):
            self._set_length(needed + needed // 4)
        for buffer, share, layout in zip(self._buffers, packed, layouts, strict=True):
            _fill(buffer, share, layout)
        return cast(BatchAndShare, self._receiver.receive(self._for_ranks()))

    def end(self) -> None:
        """Send the end of the data."""
        self._announce(_END)

    def fail(self, error: Exception) -> None:
        """Send an error, which every other rank raises."""
        text = f"{type(error).__name__}: {error}".encode()
        self._announce(_ERROR, 0, text[: self._receiver.length - _HEADER_BYTES])

    def _set_length(self, length: int) -> None:
        length = max(_aligned(length), _FIRST_LENGTH)
        self._announce(_LENGTH, length)
        self._receiver.length = length
        self._buffers = self._new_buffers()

    def _announce(self, kind: int, number: int = 0, text: bytes = b"") -> None:
        for buffer in self._buffers:
            _write(buffer, (kind, number, len(text), 0), text)
        self._receiver.scatter(self._for_ranks())

    def _new_buffers(self) -> list[Tensor]:
        return [torch.zeros(self._receiver.length, dtype=torch.uint8, device="cpu") for _ in self._layouts]

    def _for_ranks(self) -> list[Tensor]:
        return [self._buffers[index] for index in self._index_of]


def _pack(batch: Any, share: BatchShare) -> _Packed:
    found: list[Tensor] = []
    values: list[Any] = []
    tree = _tree(batch, found, values)
    try:
        text = json.dumps(values).encode() if values else b""
    except (TypeError, ValueError) as error:
        raise MisuseError(f"a batch that rank 0 reads for all ranks cannot be sent: {error}; {_ADVICE}") from error
    tensors: list[Any] = []
    at = 0
    for tensor in found:
        tensors.append([str(tensor.dtype), list(tensor.shape), at])
        at = _aligned(at + tensor.numel() * tensor.element_size())
    return _Packed([list(share), tree, tensors], text, found, at)


def _fill(buffer: Tensor, share: _Packed, layout: bytes) -> None:
    _write(buffer, (_BATCH, 0, len(share.values), len(layout)), share.values + layout)
    base = _aligned(_HEADER_BYTES + len(share.values) + len(layout))
    for tensor, place in zip(share.tensors, share.layout[2], strict=True):
        _view(buffer, base, *place).copy_(tensor.detach())


def _write(buffer: Tensor, numbers: tuple[int, int, int, int], text: bytes) -> None:
    array = buffer.numpy()
    array[:_HEADER_BYTES].view(np.int64)[:] = numbers
    array[_HEADER_BYTES : _HEADER_BYTES + len(text)] = np.frombuffer(text, dtype=np.uint8)


def _numbers(content: Tensor) -> list[int]:
    return content[:_HEADER_BYTES].view(torch.int64).tolist()


def _view(content: Tensor, base: int, name: str, shape: list[int], at: int) -> Tensor:
    dtype = _DTYPES[name]
    start = base + at
    return content[start : start + dtype.itemsize * math.prod(shape)].view(dtype).view(shape)


def _aligned(length: int) -> int:
    return -(-length // _ALIGN) * _ALIGN


def _tree(item: Any, tensors: list[Tensor], values: list[Any]) -> Any:
    """Return the structure of a batch as JSON; append its tensors and other values to the lists."""
    if isinstance(item, np.ndarray) and item.dtype.kind in "biufc" and item.dtype.isnative:
        tensors.append(torch.from_numpy(np.ascontiguousarray(item)))
        return {"array": len(tensors) - 1}
    if isinstance(item, Tensor) and item.layout == torch.strided and not item.is_quantized:
        tensors.append(item)
        return {"tensor": len(tensors) - 1}
    if item is None or type(item) in (bool, int, float, str):
        values.append(item)
        return {"value": len(values) - 1}
    if type(item) is list:
        return [_tree(child, tensors, values) for child in item]
    if type(item) is tuple:
        return {"tuple": [_tree(child, tensors, values) for child in item]}
    if isinstance(item, Mapping) and all(type(key) is str for key in item):
        return {"dict": [[key, _tree(child, tensors, values)] for key, child in item.items()]}
    raise MisuseError(
        f"a batch that rank 0 reads for all ranks holds a {type(item).__name__}, which cannot be sent; {_ADVICE}"
    )


def _rebuild(node: Any, tensors: list[Tensor], values: list[Any]) -> Any:
    """Return the batch with the structure of `_tree`."""
    if isinstance(node, list):
        return [_rebuild(child, tensors, values) for child in node]
    kind, inside = next(iter(cast("dict[str, Any]", node).items()))
    if kind == "tensor":
        return tensors[inside]
    if kind == "array":
        return tensors[inside].cpu().numpy()
    if kind == "value":
        return values[inside]
    if kind == "tuple":
        return tuple([_rebuild(child, tensors, values) for child in inside])
    return {key: _rebuild(child, tensors, values) for key, child in inside}
