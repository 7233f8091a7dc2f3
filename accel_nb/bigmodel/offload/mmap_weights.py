"""Weights that are used without a copy: tensors over memory-mapped pages of files in the page cache."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from accel_nb.bigmodel.host_memory import ALIGNMENT
from accel_nb.bigmodel.safetensors_reader import FileTensor, SafetensorsFile

_HOLE_BYTES = 64 << 10
"""Tensors at most this far apart in a file share a mapping."""


class FileRange:
    """A range of a file with consecutive tensors; ``begin`` and ``end`` in bytes from the start of the file."""

    def __init__(self, first: FileTensor) -> None:
        self.file: SafetensorsFile = first.file
        self.begin = first.offset
        self.end = first.offset + first.nbytes

    def extend_by(self, tensor: FileTensor) -> bool:
        """Extend the range by a tensor if it follows closely in the same file; return whether it does."""
        if tensor.file is not self.file or tensor.offset - self.end > _HOLE_BYTES:
            return False
        self.end = max(self.end, tensor.offset + tensor.nbytes)
        return True


def merge_ranges(tensors: Sequence[FileTensor]) -> Iterator[tuple[FileRange, list[int]]]:
    """Yield ranges of files, and the indices of the tensors in each."""
    order = sorted(range(len(tensors)), key=lambda index: (id(tensors[index].file), tensors[index].offset))
    file_range: FileRange | None = None
    inside: list[int] = []
    for index in order:
        if file_range is None or not file_range.extend_by(tensors[index]):
            if file_range is not None:
                yield file_range, inside
            file_range, inside = FileRange(tensors[index]), []
        inside.append(index)
    if file_range is not None:
        yield file_range, inside


def are_cached(tensors: Sequence[FileTensor]) -> bool:
    """Return whether all tensors are in the page cache, so that reading them does not wait for a disk."""
    ranges = (file_range for file_range, _ in merge_ranges(tensors))
    return all(part.file.is_cached(part.begin, part.end - part.begin) for part in ranges)


class PageLease:
    """Tensors over mapped pages of files; they may be accessed between `acquire` and `release` only.

    Access to pages that another process has truncated would end this process (SIGBUS); a file lease prevents that.
    """

    def __init__(self, tensors: list[Tensor], files: Sequence[SafetensorsFile]) -> None:
        self.tensors = tensors
        self._files = files
        self._leased: list[SafetensorsFile] = []

    def acquire(self) -> None:
        """Acquire leases on the files; raises `OSError` if one was truncated or is open for writing."""
        try:
            for file in self._files:
                file.acquire_lease()
                self._leased.append(file)
                file.check_length()
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Release the leases, so that other processes can write to the files."""
        while self._leased:
            self._leased.pop().release_lease()


def can_lease(tensors: Sequence[FileTensor], *, reads_few_rows: bool = False) -> bool:
    """Return whether tensors are in the page cache, aligned as CPU kernels need it, and in files that support leases.

    ``reads_few_rows``: only few rows are looked up, which reads few pages, and copies rows without arithmetic. Then the
    offsets need to be multiples of the item sizes only.
    """
    if not all(file.can_lease() for file in {tensor.file for tensor in tensors}):
        return False
    if any(tensor.offset % tensor.dtype.itemsize for tensor in tensors):  # torch views no such bytes in another dtype
        return False
    if reads_few_rows:
        return True
    is_aligned = all(tensor.offset % ALIGNMENT == 0 for tensor in tensors)
    return (is_aligned or is_alignment_irrelevant()) and are_cached(tensors)


def lease_pages(tensors: Sequence[FileTensor], *, reads_few_rows: bool = False) -> PageLease:
    """Return tensors over mapped pages, all read at once (``reads_few_rows``: on access).

    Pages are copied on write; the files do not change. Raises `OSError` for files that cannot be read or were
    truncated.
    """
    mapped: dict[int, Tensor] = {}
    for file_range, inside in merge_ranges(tensors):
        pages = file_range.file.map_part(file_range.begin, file_range.end - file_range.begin, whole=not reads_few_rows)
        for index in inside:
            begin = tensors[index].offset - file_range.begin
            part = pages[begin : begin + tensors[index].nbytes]
            mapped[index] = part.view(tensors[index].dtype).view(tensors[index].shape)
    return PageLease([mapped[index] for index in range(len(tensors))], list({tensor.file for tensor in tensors}))


@functools.cache
def is_alignment_irrelevant() -> bool:
    """Return whether matrix products are bitwise equal for every alignment of the matrix; measured on this processor.

    Files of the safetensors library have tensors at multiples of 8 bytes. Some kernels (MKL's matrix-vector product
    with SSE4.2) add in another order if the address is not a multiple of 16.
    """
    drawn = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for rows, columns in ((8, 8), (100, 37), (256, 512)):
            weight = torch.randn(rows, columns, generator=drawn, device="cpu").to(dtype)
            memory = torch.empty(weight.nbytes + 2 * ALIGNMENT, dtype=torch.uint8, device="cpu")
            start = -memory.data_ptr() % ALIGNMENT
            for count in (1, 4):
                given = torch.randn(count, columns, generator=drawn, device="cpu").to(dtype)
                expected: Tensor | None = None
                for phase in range(0, ALIGNMENT, 8):
                    begin = start + phase
                    moved = memory[begin : begin + weight.nbytes].numpy()
                    own = torch.frombuffer(moved, dtype=dtype).view(rows, columns).copy_(weight)
                    with torch.autocast("cpu", enabled=False):  # the user's may be in effect, and the result is kept
                        found = functional.linear(given, own)
                    expected = found if expected is None else expected
                    if not torch.equal(found, expected):
                        return False
    return True
