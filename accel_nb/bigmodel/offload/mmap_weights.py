"""Weights that are computed with where they lie: in pages of files that the system has cached, without a copy."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from accel_nb.bigmodel.host_memory import ALIGNMENT
from accel_nb.bigmodel.safetensors_reader import FileTensor, ShardFile

_HOLE_BYTES = 64 << 10
"""Tensors that lie as near to each other are mapped at once."""


class Extent:
    """A part of a file that holds tensors one after another; ``begin`` and ``end`` in bytes from the file's start."""

    def __init__(self, first: FileTensor) -> None:
        self.file: ShardFile = first.file
        self.begin = first.offset
        self.end = first.offset + first.nbytes

    def takes(self, tensor: FileTensor) -> bool:
        """Whether a tensor follows; it is part of the extent then."""
        if tensor.file is not self.file or tensor.offset - self.end > _HOLE_BYTES:
            return False
        self.end = max(self.end, tensor.offset + tensor.nbytes)
        return True


def extents(tensors: Sequence[FileTensor]) -> Iterator[tuple[Extent, list[int]]]:
    """Yield parts of files, and the indices of the tensors that lie in each."""
    order = sorted(range(len(tensors)), key=lambda at: (id(tensors[at].file), tensors[at].offset))
    extent: Extent | None = None
    inside: list[int] = []
    for at in order:
        if extent is None or not extent.takes(tensors[at]):
            if extent is not None:
                yield extent, inside
            extent, inside = Extent(tensors[at]), []
        inside.append(at)
    if extent is not None:
        yield extent, inside


def are_at_hand(tensors: Sequence[FileTensor]) -> bool:
    """Whether reading tensors is a matter of copying, and not of waiting for a disk."""
    return all(extent.file.is_cached(extent.begin, extent.end - extent.begin) for extent, _ in extents(tensors))


class Loan:
    """Tensors over pages of files, which are to be touched between `begin` and `end` only."""

    def __init__(self, tensors: list[Tensor], files: Sequence[ShardFile]) -> None:
        self.tensors = tensors
        self._files = files
        self._held: list[ShardFile] = []

    def begin(self) -> None:
        """Keep the files as long as they are; raises `OSError` if one has become shorter, or is being written to."""
        try:
            for file in self._files:
                file.hold()
                self._held.append(file)
                file.check_length()
        except OSError:
            self.end()
            raise

    def end(self) -> None:
        """Let others write to the files again."""
        while self._held:
            self._held.pop().let_go()


def can_lend(tensors: Sequence[FileTensor], *, rows_only: bool = False) -> bool:
    """Whether tensors are in the system's cache, kernels compute the same from there, and it is safe to touch.

    ``rows_only``: few rows of each are going to be looked up, which no kernel rounds, and few pages hold.
    """
    if not all(file.can_be_held() for file in {tensor.file for tensor in tensors}):
        return False
    if rows_only:
        return True
    is_aligned = all(tensor.offset % ALIGNMENT == 0 for tensor in tensors)
    return (is_aligned or alignment_is_no_matter()) and are_at_hand(tensors)


def lend(tensors: Sequence[FileTensor], *, rows_only: bool = False) -> Loan:
    """Return tensors over the files' pages, once these are in memory (``rows_only``: as they are touched).

    What is written to them is the process's own, and does not come to the files. Raises `OSError` for files that cannot
    be read or have become shorter.
    """
    lent: dict[int, Tensor] = {}
    for extent, inside in extents(tensors):
        pages = extent.file.map_part(extent.begin, extent.end - extent.begin, whole=not rows_only)
        for at in inside:
            begin = tensors[at].offset - extent.begin
            part = pages[begin : begin + tensors[at].nbytes]
            lent[at] = part.view(tensors[at].dtype).view(tensors[at].shape)
    return Loan([lent[at] for at in range(len(tensors))], list({tensor.file for tensor in tensors}))


@functools.cache
def alignment_is_no_matter() -> bool:
    """Whether products come out the same, bit by bit, wherever a matrix starts; asked of this processor's kernels.

    Tensors of a safetensors file start at any multiple of 8 bytes. Some kernels (MKL's product of a matrix and a vector
    where it computes with SSE4.2) add in another order for those that are no multiple of 16.
    """
    drawn = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for rows, columns in ((8, 8), (100, 37), (256, 512)):
            weight = torch.randn(rows, columns, generator=drawn).to(dtype)
            memory = torch.empty(weight.nbytes + 2 * ALIGNMENT, dtype=torch.uint8)
            start = -memory.data_ptr() % ALIGNMENT
            for count in (1, 4):
                given = torch.randn(count, columns, generator=drawn).to(dtype)
                expected: Tensor | None = None
                for phase in range(0, ALIGNMENT, 8):
                    begin = start + phase
                    moved = memory[begin : begin + weight.nbytes].numpy()
                    own = torch.frombuffer(moved, dtype=dtype).view(rows, columns).copy_(weight)
                    found = functional.linear(given, own)
                    expected = found if expected is None else expected
                    if not torch.equal(found, expected):
                        return False
    return True
