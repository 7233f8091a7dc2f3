"""Collectives over nested structures: one message for shapes and one for content, whatever the number of tensors.

If a rank needs the shapes of the others, all ranks first exchange a header of fixed size: a digest of the operation
and the structure, then lengths. If digests differ, ranks exchange descriptions of their calls and all raise, so that no
rank waits. Content of a few KB on the CPU is sent with the header, so gathering a metric takes one message.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import struct
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from accel_nb.errors import MisuseError, RankMismatchError
from accel_nb.runtime.distributed.communicator import Communicator, Operation
from accel_nb.runtime.process import serialization
from accel_nb.runtime.tensors.nested import describe, find_leaves, find_tensors, map_tensors
from accel_nb.runtime.tensors.overlap import overwrite

T = TypeVar("T")

_CAPACITY = 64  # numbers in a header; a structure with more tensors needs one more message
_MESSAGE_BYTES = 4096  # a header and the content that is sent with it
_INLINE_BYTES = _MESSAGE_BYTES - 8 * _CAPACITY
_BUCKET_BYTES = 25 * 2**20
_SINGLE_TENSOR_HEADER = struct.Struct(
    "=qqq"
)  # of a gathered tensor: the digest, whether content follows, and the length
_NUMPY_DTYPES = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}
    | {torch.bool}
)
_ERROR = -1  # sent in place of a digest or a size by a rank that has an error
_PACKAGE = f"{Path(__file__).parents[2]}{os.sep}"


class Collectives:
    """Collectives over nested tensors and plain objects.

    Every rank must make the same calls in the same order; each call waits for all ranks. With ``verify`` every call
    first checks that all ranks make the same call with matching tensors, and raises `MisuseError` on all ranks if not.
    `gather`, `pad_across`, `scatter` and the exchange of objects check structures and dtypes even without it.
    """

    def __init__(self, comm: Communicator, *, verify: bool = False) -> None:
        self._comm = comm
        self._world = comm.world
        self._verifies = verify
        # Whether scalars of a single rank stay scalars, as in accelerate.
        self.keeps_scalars = False
        # Why no collective may start: some ranks may have left a block that others have not left.
        self.blocked_reason: str | None = None

    def gather(self, nested: T) -> T:
        """Return the tensors of all ranks, concatenated along the first dim in rank order; first dims may differ.

        A scalar counts as one value. Raises `MisuseError` on every rank if structures, dtypes or other dims differ.
        """
        leaves, problem = _check_tensors("gather", nested)
        if self._world.size == 1:
            _raise_if(problem)
            found = [leaf.detach() for leaf in leaves]
            return _rebuild(nested, [leaf if leaf.dim() or self.keeps_scalars else leaf.reshape(1) for leaf in found])
        parts = self._gather_each(leaves, nested, problem)
        return _rebuild(nested, [torch.cat(list(column)) for column in zip(*parts, strict=True)])

    def gather_each(
        self, tensors: list[Tensor], problem: MisuseError | None = None, like: Any = None
    ) -> list[list[Tensor]]:
        """Return each rank's list of tensors; first dims may differ. The ``problem`` of one rank is raised on all.

        ``like`` is the structure that must be equal on all ranks, if it is not a list of the tensors.
        """
        if self._world.size == 1:
            _raise_if(problem)
            return [tensors]
        is_quick = like is None and len(tensors) == 1 and problem is None and self.blocked_reason is None
        if is_quick and _is_small(tensors[0]):
            return [[part] for part in self._gather_one(tensors[0])]
        return self._gather_each(tensors, tensors if like is None else like, problem)

    def pad_across(self, nested: T, dim: int = 0, value: float = 0, *, pad_first: bool = False) -> T:
        """Return tensors padded along ``dim`` to the longest on any rank; tensors without that dim are unchanged."""
        leaves, problem = _check_tensors("pad_across_processes", nested)
        lengths = [leaf.shape[dim] if -leaf.dim() <= dim < leaf.dim() else 0 for leaf in leaves]
        if self._world.size == 1:
            _raise_if(problem)
            return nested
        like = describe(map_tensors(lambda leaf: torch.empty([0] * leaf.dim(), dtype=leaf.dtype, device="cpu"), nested))
        rows, _ = self._exchange(f"pad_across_processes(dim={dim})", like, lengths, nested, problem)
        longest = [max(row[index] for row in rows) for index in range(len(leaves))]
        padded = [_pad(leaf, dim, size, value, pad_first) for leaf, size in zip(leaves, longest, strict=True)]
        return _rebuild(nested, padded)

    def reduce(self, nested: T, op: Operation = "sum", scale: float = 1.0) -> T:
        """Return the sum, mean, maximum or minimum over ranks, times ``scale``: one collective for each dtype.

        The mean of integers and bools has the default float dtype; the sum of bools is the number of true ones.
        """
        leaves, problem = _check_tensors("reduce", nested)
        self._verify(f"reduce({op!r})", nested, nested, problem)
        _raise_if(problem)
        prepared = [_to_reducible(leaf.detach(), op) for leaf in leaves]
        results: list[Tensor] = list(prepared)
        for group in _group_by_dtype(prepared):
            device = prepared[group[0]].device
            flat = torch.cat([prepared[index].to(device).reshape(-1) for index in group])
            reduced = self._comm.all_reduce(flat, op)
            parts = reduced.split([prepared[index].numel() for index in group])
            for index, part in zip(group, _copy_if_shared(parts), strict=True):
                results[index] = part.reshape(leaves[index].shape).to(leaves[index].device)
        if scale != 1.0:
            results = [result * scale for result in results]
        kept = [
            result.bool() if leaf.dtype == torch.bool and op in ("max", "min") and scale == 1.0 else result
            for leaf, result in zip(leaves, results, strict=True)
        ]
        return _rebuild(nested, kept)

    def broadcast(self, nested: T, source: int = 0) -> T:
        """Return rank ``source``'s tensors on every rank, in one collective; shapes and dtypes must be equal."""
        self._check_rank(source)
        leaves, problem = _check_tensors("broadcast", nested)
        self._verify(f"broadcast(from_process={source})", nested, nested, problem)
        _raise_if(problem)
        if self._world.size == 1:
            return _rebuild(nested, [leaf.detach().clone() for leaf in leaves])
        own = _as_bytes(leaves)  # of a single tensor, they may be its own memory, which a broadcast overwrites
        content = self._comm.broadcast(own.clone() if len(leaves) == 1 else own, source)
        return _rebuild(nested, _copy_if_shared(_from_bytes(content, leaves, [tuple(leaf.shape) for leaf in leaves])))

    def scatter(self, nested: Any, source: int = 0) -> Any:
        """Return this rank's share of rank ``source``'s tensors, divided along their first dim.

        Shares differ by at most one row; every rank receives the same scalars. Other ranks pass None, or the same
        structure with tensors of any shape; the latter is required if the structure has named tuples, dataclasses or
        mappings other than dict.
        """
        self._check_rank(source)
        is_source = self._world.rank == source
        leaves, problem = _check_tensors("scatter", nested)
        descriptions = self._exchange_objects("scatter", _describe_for_scatter(nested, leaves, is_source), problem)
        of_source = descriptions[source]
        passed = [text for rank, (text, *_) in enumerate(descriptions) if rank != source and text is not None]
        lacks_one = of_source[1] is None and any(text is None for text, *_ in descriptions)
        if of_source[0] is None or lacks_one or any(text != of_source[0] for text in passed):
            self._raise_difference("scatter", [text or "nothing" for text, *_ in descriptions], _SCATTER_HINT)
        like = nested if is_source or nested is not None else of_source[1]
        templates = [torch.empty((), dtype=getattr(torch, name), device="cpu") for name, _ in of_source[2]]
        shares = [_shares(tuple(shape), self._world.size) for _, shape in of_source[2]]
        own_shares = [each[self._world.rank] for each in shares]
        if self._world.size == 1:
            return _rebuild(nested, [leaf.detach().clone() for leaf in leaves])
        return _rebuild(
            like, self._scatter_content(leaves if is_source else None, templates, shares, own_shares, source)
        )

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order; raise `MisuseError` on all ranks for a type that cannot be sent."""
        return self._exchange_objects("gather_object", value)

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """Return rank ``source``'s value on every rank; the values of other ranks are ignored."""
        self._check_rank(source)
        self._verify(f"broadcast_object(from_process={source})", None, None, None)
        message, problem = _try_encode(value) if self._world.rank == source else (b"", None)
        if self._world.size == 1:
            _raise_if(problem)
            return serialization.decode(message)
        size = int(
            self._comm.broadcast(torch.tensor([len(message) if problem is None else _ERROR], device="cpu"), source)
        )
        _raise_if(problem)
        if size == _ERROR:
            raise MisuseError(f"rank {source} tried to send a value that ranks cannot exchange; its error has details")
        content = (
            _bytes_tensor(message) if self._world.rank == source else torch.empty(size, dtype=torch.uint8, device="cpu")
        )
        return serialization.decode(self._comm.broadcast(content, source).numpy().tobytes())

    def barrier(self) -> None:
        """Wait until every rank has called."""
        self._verify("barrier", None, None, None)
        self._comm.barrier()

    def verify(self, op: str, nested: Any) -> None:
        """Check that every rank is about to call ``op`` with matching tensors, unless ``verify`` is off."""
        self._verify(op, nested, nested, None)

    # --- shapes ---

    def _verify(self, op: str, like: Any, nested: Any, problem: MisuseError | None) -> None:
        if self.blocked_reason is not None:
            raise MisuseError(f"{op}: {self.blocked_reason}")
        if self._verifies and self._world.size > 1:
            self._exchange(op, describe(like), [], nested, problem)

    def _exchange(
        self,
        op: str,
        like: str,
        lengths: Sequence[int],
        nested: Any,
        problem: MisuseError | None,
        content: bytes | None = None,
    ) -> tuple[list[list[int]], list[memoryview]]:
        """Return every rank's lengths, and the ``content`` that each rank has sent with its header.

        Raises on every rank if ``op`` or ``like`` differ; ``like`` describes the structure that must be equal.
        """
        if self.blocked_reason is not None:
            raise MisuseError(f"{op}: {self.blocked_reason}")
        digest = _ERROR if problem is not None else _digest(op, like, str(len(lengths)))
        first = [digest, *lengths[: _CAPACITY - 1]]
        rows, contents = self._gather_header(first, content)
        if any(row[0] != digest for row in rows) or problem is not None:
            self._raise_mismatch(op, nested, problem)
        rows = [row[1 : 1 + len(lengths)] for row in rows]
        if len(lengths) >= _CAPACITY:
            more = self._gather_numbers(list(lengths[_CAPACITY - 1 :]))
            rows = [[*row, *rest] for row, rest in zip(rows, more, strict=True)]
        return rows, contents

    def _raise_mismatch(self, op: str, nested: Any, problem: MisuseError | None) -> None:
        call = op if nested is None else f"{op} of {describe(nested)}"
        what = call if problem is None else str(problem)
        where = f" at {_call_site()}" if self._verifies else ""
        self._raise_difference(op, [str(text) for text in self._exchange_texts(what + where)], _HINT)

    def _gather_header(self, numbers: list[int], content: bytes | None) -> tuple[list[list[int]], list[memoryview]]:
        # All headers have the same length, so that ranks in different calls can exchange them.
        message = bytearray(_MESSAGE_BYTES)
        end = 8 * len(numbers)
        message[:end] = array("q", numbers).tobytes()
        if content is not None and len(content) <= _INLINE_BYTES:
            message[end : end + len(content)] = content
        gathered = self._comm.all_gather(torch.frombuffer(message, dtype=torch.uint8))
        received = [row.numpy().data for row in gathered]
        return [row[:end].cast("q").tolist() for row in received], [row[end:] for row in received]

    def _gather_numbers(self, numbers: list[int]) -> list[list[int]]:
        return torch.stack(self._comm.all_gather(torch.tensor(numbers, dtype=torch.int64, device="cpu"))).tolist()

    def _raise_difference(self, op: str, descriptions: list[str], hint: str) -> None:
        if len(set(descriptions)) == 1:
            raise MisuseError(f"{op} cannot go on: {descriptions[0]}")
        most_common = max(set(descriptions), key=descriptions.count)
        different = [rank for rank, text in enumerate(descriptions) if text != most_common]
        who = f"rank {different[0]} differs" if len(different) == 1 and len(descriptions) > 2 else "the ranks differ"
        lines = "".join(f"\n  rank {rank}: {text}" for rank, text in enumerate(descriptions))
        raise RankMismatchError(f"{op} cannot go on, since {who}:{lines}\n{hint}")

    # --- content ---

    def _gather_one(self, leaf: Tensor) -> list[Tensor]:
        """Gather one small CPU tensor, such as a metric, in a third of the time of `_gather_each`.

        The message has the same format, as other ranks may be in `_gather_each`.
        """
        shape = leaf.shape
        digest, row_bytes = _digest_and_row_bytes(leaf.dtype, shape)
        content = leaf.detach().numpy().tobytes()
        start = _SINGLE_TENSOR_HEADER.size
        message = bytearray(_MESSAGE_BYTES)
        message[:start] = _SINGLE_TENSOR_HEADER.pack(digest, 1, shape[0])
        message[start : start + len(content)] = content
        received = [part.numpy().data for part in self._comm.all_gather(torch.frombuffer(message, dtype=torch.uint8))]
        headers = [_SINGLE_TENSOR_HEADER.unpack_from(memory) for memory in received]
        if any(other != digest for other, _, _ in headers):
            self._raise_mismatch("gather", [leaf], None)
        shapes = [(length, *shape[1:]) for _, _, length in headers]
        on_hosts = [bool(is_on_host) for _, is_on_host, _ in headers]
        if not all(on_hosts) or max([length for _, _, length in headers]) * row_bytes > _INLINE_BYTES:
            return [part for [part] in self._gather_content([leaf], [shapes], on_hosts, None)]
        row_size = row_bytes // leaf.itemsize
        return [
            torch.frombuffer(memory, dtype=leaf.dtype, count=own[0] * row_size, offset=start).view(own)
            if own[0] * row_size
            else leaf.detach().new_empty(own)
            for own, memory in zip(shapes, received, strict=True)
        ]

    def _gather_each(self, leaves: list[Tensor], nested: Any, problem: MisuseError | None) -> list[list[Tensor]]:
        is_on_host = all(leaf.is_cpu for leaf in leaves)
        numbers = [int(is_on_host), *(leaf.shape[0] if leaf.dim() else 1 for leaf in leaves)]
        content = _host_bytes(leaves) if is_on_host and problem is None else None
        rows, contents = self._exchange("gather", describe(nested, any_rows=True), numbers, nested, problem, content)
        shapes = [[(row[index], *leaf.shape[1:]) for row in rows] for index, leaf in enumerate(leaves, 1)]
        return self._gather_content(leaves, shapes, [bool(row[0]) for row in rows], contents)

    def _gather_content(
        self,
        leaves: list[Tensor],
        shapes: list[list[tuple[int, ...]]],
        on_hosts: list[bool],
        contents: list[memoryview] | None,
    ) -> list[list[Tensor]]:
        """Return each rank's leaves.

        Shapes are ``shapes[leaf][rank]``, ``on_hosts`` says for each rank whether all its leaves are on the CPU. Then
        ``contents`` was received with the headers, if it is short.
        """
        sizes = [
            sum(_num_bytes(leaf, each[rank]) for leaf, each in zip(leaves, shapes, strict=True))
            for rank in range(self._world.size)
        ]
        if not any(sizes):
            return [
                [leaf.detach().new_empty(each[rank]) for leaf, each in zip(leaves, shapes, strict=True)]
                for rank in range(self._world.size)
            ]
        if contents is not None and all(on_hosts) and max(sizes) <= _INLINE_BYTES:
            return [_from_memory(row, leaves, [each[rank] for each in shapes]) for rank, row in enumerate(contents)]
        content = _as_bytes(leaves).cpu() if any(on_hosts) else _as_bytes(leaves)
        if len(content) < max(sizes):
            content = torch.cat([content, content.new_zeros(max(sizes) - len(content))])
        rows = self._comm.all_gather(content)
        return [_from_bytes(row, leaves, [each[rank] for each in shapes]) for rank, row in enumerate(rows)]

    def _scatter_content(
        self,
        leaves: list[Tensor] | None,
        templates: list[Tensor],
        shares: list[list[tuple[range, tuple[int, ...]]]],
        own_shares: list[tuple[range, tuple[int, ...]]],
        source: int,
    ) -> list[Tensor]:
        size = max(
            sum(_num_bytes(template, each[rank][1]) for template, each in zip(templates, shares, strict=True))
            for rank in range(self._world.size)
        )
        parts = None
        if leaves is not None:
            parts = []
            for rank in range(self._world.size):
                cut = [
                    leaf[each[rank][0].start : each[rank][0].stop] if leaf.dim() else leaf
                    for leaf, each in zip(leaves, shares, strict=True)
                ]
                content = _as_bytes(cut).cpu()
                parts.append(torch.cat([content, content.new_zeros(size - len(content))]))
        received = (
            self._comm.scatter(torch.empty(size, dtype=torch.uint8, device="cpu"), parts, source) if size else None
        )
        content = torch.empty(0, dtype=torch.uint8, device="cpu") if received is None else received
        made = _copy_if_shared(_from_bytes(content, templates, [shape for _, shape in own_shares]))
        device = leaves[0].device if leaves else torch.device(self._world.device)
        return [part.to(device) for part in made]

    # --- objects ---

    def _exchange_objects(self, op: str, value: Any, problem: MisuseError | None = None) -> list[Any]:
        if self.blocked_reason is not None:
            raise MisuseError(f"{op}: {self.blocked_reason}")
        message, refused = _try_encode(value)
        problem = problem or refused
        if self._world.size == 1:
            _raise_if(problem)
            return [serialization.decode(message)]
        own = len(message) if problem is None else _ERROR
        rows, contents = self._exchange(op, "", [own], None, None, message)
        sizes = [row[0] for row in rows]
        if _ERROR in sizes:
            _raise_if(problem)
            raise MisuseError(
                f"{op}: rank {sizes.index(_ERROR)} passed a value that ranks cannot exchange; its error has details"
            )
        if max(sizes) <= _INLINE_BYTES:
            return [serialization.decode(bytes(memory[:size])) for memory, size in zip(contents, sizes, strict=True)]
        return [serialization.decode(part) for part in self._gather_bytes(message, sizes)]

    def _exchange_texts(self, text: str) -> list[Any]:
        message = serialization.encode(text)
        sizes = [row[0] for row in self._gather_numbers([len(message)])]
        return [serialization.decode(part) for part in self._gather_bytes(message, sizes)]

    def _gather_bytes(self, message: bytes, sizes: list[int]) -> Iterator[bytes]:
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
        padded[: len(message)] = _bytes_tensor(message)
        for part, size in zip(self._comm.all_gather(padded), sizes, strict=True):
            yield part[:size].numpy().tobytes()

    def _check_rank(self, source: int) -> None:
        if not 0 <= source < self._world.size:
            raise MisuseError(f"there is no rank {source}; ranks go from 0 to {self._world.size - 1}")


class VerifiedComm:
    """A communicator for debugging: checks before each collective that every rank makes the same call."""

    def __init__(self, comm: Communicator) -> None:
        self.world = comm.world
        self._comm = comm
        self._collectives = Collectives(comm, verify=True)

    def all_reduce(self, tensor: Tensor, op: Operation = "sum") -> Tensor:
        """See `Communicator.all_reduce`."""
        self._collectives.verify(f"all_reduce({op!r})", tensor)
        return self._comm.all_reduce(tensor, op)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """See `Communicator.all_gather`."""
        self._collectives.verify("all_gather", tensor)
        return self._comm.all_gather(tensor)

    def reduce_scatter(self, tensor: Tensor, op: Operation = "sum") -> Tensor:
        """See `Communicator.reduce_scatter`."""
        self._collectives.verify(f"reduce_scatter({op!r})", tensor)
        return self._comm.reduce_scatter(tensor, op)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """See `Communicator.broadcast`."""
        self._collectives.verify(f"broadcast from rank {source}", tensor)
        return self._comm.broadcast(tensor, source)

    def scatter(self, tensor: Tensor, parts: Sequence[Tensor] | None, source: int = 0) -> Tensor:
        """See `Communicator.scatter`."""
        self._collectives.verify(f"scatter from rank {source}", tensor)
        return self._comm.scatter(tensor, parts, source)

    def sums_at_once(self, tensor: Tensor) -> bool:
        """See `Communicator.sums_at_once`."""
        return self._comm.sums_at_once(tensor)

    def start_any(self, flag: bool) -> Callable[[], bool]:
        """See `Communicator.start_any`."""
        self._collectives.verify("start_any", None)
        return self._comm.start_any(flag)

    def all_gather_json(self, value: Any) -> list[Any]:
        """See `Communicator.all_gather_json`."""
        self._collectives.verify("all_gather_json", None)
        return self._comm.all_gather_json(value)

    def broadcast_json(self, value: Any, source: int = 0) -> Any:
        """See `Communicator.broadcast_json`."""
        self._collectives.verify(f"broadcast_json from rank {source}", None)
        return self._comm.broadcast_json(value, source)

    def barrier(self, timeout_s: float | None = None) -> None:
        """See `Communicator.barrier`."""
        self._collectives.verify("barrier", None)
        self._comm.barrier(timeout_s)


def all_reduce_bucketed(comm: Communicator, tensors: Iterable[Tensor], op: Operation = "sum") -> None:
    """Reduce tensors in place, in buckets of 25 MiB; every rank passes the same list."""
    waiting: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    sizes: Counter[tuple[torch.dtype, torch.device]] = Counter()
    for tensor in tensors:
        kind = tensor.dtype, tensor.device
        waiting.setdefault(kind, []).append(tensor)
        sizes[kind] += tensor.numel() * tensor.element_size()
        if sizes[kind] >= _BUCKET_BYTES:
            _reduce_bucket(comm, waiting.pop(kind), op)
            del sizes[kind]
    for bucket in waiting.values():
        _reduce_bucket(comm, bucket, op)


def _reduce_bucket(comm: Communicator, bucket: list[Tensor], op: Operation) -> None:
    flat = comm.all_reduce(torch.cat([tensor.detach().reshape(-1) for tensor in bucket]), op)
    for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
        overwrite(tensor.detach(), part.view(tensor.shape))


_HINT = "Every rank must make the same call, with the same structure, dtypes and dims past the first."
_SCATTER_HINT = (
    "The source passes the tensors; other ranks pass None or the same structure. They must pass the structure if it "
    "has named tuples, dataclasses or mappings other than dict."
)


def _check_tensors(op: str, nested: Any) -> tuple[list[Tensor], MisuseError | None]:
    """Return the tensors, and an error for unsuitable leaves, which the caller raises on all ranks together."""
    for leaf in find_leaves(nested):
        if leaf is None:
            continue
        if not isinstance(leaf, Tensor):
            return [], MisuseError(
                f"{op} takes tensors, nested in tuples, lists, mappings and dataclasses, and got a "
                f"{type(leaf).__qualname__}; make it a tensor, or use gather_object or broadcast_object_list"
            )
        if leaf.layout is not torch.strided or leaf.is_quantized or leaf.is_nested:
            kind, dense = (
                ("a quantized one", "dequantize()") if leaf.is_quantized
                else ("a nested one", "to_padded_tensor(padding)") if leaf.is_nested
                else (f"one of layout {leaf.layout}", "to_dense()")
            )  # fmt: skip
            return [], MisuseError(f"{op} takes dense tensors, and got {kind}; call {dense} first")
    return list(find_tensors(nested)), None


def _raise_if(problem: MisuseError | None) -> None:
    if problem is not None:
        raise problem


def _rebuild(nested: Any, leaves: Iterable[Tensor]) -> Any:
    rest = iter(leaves)
    return map_tensors(lambda _: next(rest), nested)


@functools.lru_cache(1024)
def _digest(*texts: str) -> int:
    return int.from_bytes(hashlib.blake2b("\x1f".join(texts).encode(), digest_size=7).digest(), "big")


@functools.lru_cache(256)
def _digest_and_row_bytes(dtype: torch.dtype, shape: torch.Size) -> tuple[int, int]:
    """Return the digest that `_exchange` computes for a list of one such tensor, and the bytes of one row."""
    like = describe([torch.empty(shape, dtype=dtype, device="meta")], any_rows=True)
    return _digest("gather", like, "2"), dtype.itemsize * math.prod(shape[1:])


def _is_small(leaf: Tensor) -> bool:
    return (
        type(leaf) is Tensor
        and leaf.dtype in _NUMPY_DTYPES
        and leaf.is_cpu
        and leaf.layout is torch.strided
        and leaf.dim() > 0
        and leaf.nbytes <= _INLINE_BYTES
        and not leaf.is_neg()
    )


def _call_site() -> str:
    """Return file and line of the innermost caller outside of this package."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return "an unknown line" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _pad(tensor: Tensor, dim: int, length: int, value: float, pad_first: bool) -> Tensor:
    if not -tensor.dim() <= dim < tensor.dim() or tensor.shape[dim] == length:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = length - tensor.shape[dim]
    filler = tensor.new_full(shape, value)
    return torch.cat([filler, tensor] if pad_first else [tensor, filler], dim)


def _to_reducible(tensor: Tensor, op: Operation) -> Tensor:
    """Return the tensor in a dtype that ``op`` can reduce; the caller's tensor is not changed."""
    if tensor.dtype == torch.bool:
        tensor = tensor.to(torch.uint8 if op in ("max", "min") else torch.int64)
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.to(torch.get_default_dtype())
    return tensor


def _group_by_dtype(leaves: list[Tensor]) -> list[list[int]]:
    groups: dict[torch.dtype, list[int]] = {}
    for index, leaf in enumerate(leaves):
        groups.setdefault(leaf.dtype, []).append(index)
    return list(groups.values())


def _order(leaves: Sequence[Tensor]) -> list[int]:
    """Return the order of leaves in a message: by decreasing element size, so that each leaf is aligned."""
    if len(leaves) == 1:
        return [0]
    return sorted(range(len(leaves)), key=lambda index: -leaves[index].element_size())


def _num_bytes(leaf: Tensor, shape: Sequence[int]) -> int:
    return leaf.element_size() * math.prod(shape)


def _as_bytes(leaves: Sequence[Tensor]) -> Tensor:
    """Return the content of all leaves as one tensor of bytes."""
    if not leaves:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    device = next((leaf.device for leaf in leaves if not leaf.is_cpu), leaves[0].device)
    if len(leaves) == 1:
        return _flat_bytes(leaves[0])
    return torch.cat([_flat_bytes(leaves[index].to(device)) for index in _order(leaves)])


def _host_bytes(leaves: Sequence[Tensor]) -> bytes | None:
    """Return the content of leaves on the CPU if it can be sent with a header; None if it is too long."""
    if sum([leaf.nbytes for leaf in leaves]) > _INLINE_BYTES:
        return None
    return b"".join([_flat_bytes(leaves[index]).numpy().tobytes() for index in _order(leaves)])


def _from_memory(content: memoryview, leaves: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Return the tensors of a message of `_host_bytes` without a copy; ``leaves`` have the dtypes."""
    made = list(leaves)
    start = 0
    for index in _order(leaves):
        dtype, shape = leaves[index].dtype, shapes[index]
        count = math.prod(shape)
        found = (
            torch.frombuffer(content, dtype=dtype, count=count, offset=start)
            if count
            else torch.empty(0, dtype=dtype, device="cpu")
        )
        made[index] = found.view(shape)
        start += count * dtype.itemsize
    return made


def _flat_bytes(leaf: Tensor) -> Tensor:
    return leaf.detach().contiguous().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)


def _from_bytes(content: Tensor, leaves: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Return the tensors of a message of `_as_bytes`, with ``shapes`` and the dtypes and devices of ``leaves``."""
    made = list(leaves)
    start = 0
    for index in _order(leaves):
        leaf, shape = leaves[index], shapes[index]
        stop = start + _num_bytes(leaf, shape)
        part = content[start:stop].view(leaf.dtype) if stop > start else content.new_empty(0, dtype=leaf.dtype)
        made[index] = part.view(shape).to(leaf.device)
        start = stop
    return made


def _copy_if_shared(parts: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return tensors that share no memory: views of one tensor share a version counter."""
    return [part.clone() for part in parts] if len(parts) > 1 else parts


def _bytes_tensor(message: bytes) -> Tensor:
    return (
        torch.frombuffer(bytearray(message), dtype=torch.uint8)
        if message
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )


def _try_encode(value: Any) -> tuple[bytes, MisuseError | None]:
    try:
        return serialization.encode(value), None
    except MisuseError as error:
        return b"", error


def _describe_for_scatter(nested: Any, leaves: list[Tensor], is_source: bool) -> tuple[str | None, Any, list[Any]]:
    """Return a rank's message before a scatter: structure as text and, if possible, as value; dtypes; shapes."""
    if nested is None:
        return None, None, []
    text = describe(map_tensors(lambda _: None, nested))
    if not is_source:
        return text, None, []
    like = map_tensors(lambda _: torch.empty(0, device="cpu"), nested)
    _, refused = _try_encode(like)
    dtypes_and_shapes = [(str(leaf.dtype).removeprefix("torch."), list(leaf.shape)) for leaf in leaves]
    return text, like if refused is None else None, cast("list[Any]", dtypes_and_shapes)


def _shares(shape: tuple[int, ...], size: int) -> list[tuple[range, tuple[int, ...]]]:
    """Return the rows of each rank and the shape of its share."""
    if not shape:
        return [(range(0), shape)] * size
    small, num_larger = divmod(shape[0], size)
    starts = [rank * small + min(rank, num_larger) for rank in range(size + 1)]
    return [
        (range(starts[rank], starts[rank + 1]), (starts[rank + 1] - starts[rank], *shape[1:])) for rank in range(size)
    ]
