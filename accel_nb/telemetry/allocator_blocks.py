"""The allocator's segments and blocks on one device, condensed from a memory snapshot to a list of bounded length.

The allocator reserves segments of the device's memory and divides them into blocks. Snapshots have the format of
``torch.cuda.memory_snapshot()``. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

IN_USE, AWAITING_FREE, FREE, MIXED = range(4)
"""States of a block: in use by a tensor; freed, but still used by a stream; free; several small blocks merged."""

MAX_SEGMENTS = 64
MAX_BLOCKS = 512

_STATES = {"active_allocated": IN_USE, "inactive": FREE}


@dataclass(frozen=True, slots=True)
class AllocatorSummary:
    """Memory of one device at one moment; sizes in bytes.

    ``segments`` are the sizes of the largest segments, in descending order. ``blocks`` are tuples (segment, offset,
    size, state) in the order of segments and addresses. The other fields count all segments.
    """

    segments: tuple[int, ...]
    blocks: tuple[tuple[int, int, int, int], ...]
    num_segments: int
    reserved: int
    in_use: int
    largest_free: int


def condense_snapshot(
    snapshot: Iterable[Mapping[str, Any]],
    device: int,
    *,
    max_segments: int = MAX_SEGMENTS,
    max_blocks: int = MAX_BLOCKS,
) -> AllocatorSummary:
    """Return the map of one device from a snapshot of all devices; it lists at most about ``max_blocks`` blocks.

    Adjacent blocks of the same state are merged. If there are still too many, adjacent small blocks are merged into
    blocks of state ``MIXED``; large blocks keep position and size. The totals count all blocks.
    """
    segments = sorted(
        (segment for segment in snapshot if segment.get("device", device) == device),
        key=lambda segment: -int(segment["total_size"]),
    )
    merged = [list(_merge_states(segment["blocks"])) for segment in segments]
    reserved = sum(int(segment["total_size"]) for segment in segments)
    shown = merged[:max_segments]
    blocks: list[tuple[int, int, int, int]] = []
    total = sum(size for runs in shown for _, size, _ in runs)
    smallest = 2 * total // max(1, max_blocks - 3 * len(shown))
    is_too_long = sum(map(len, shown)) > max_blocks
    for index, runs in enumerate(shown):
        listed = _merge_small(runs, smallest) if is_too_long else runs
        blocks += [(index, offset, size, state) for offset, size, state in listed]
    runs = [run for listed in merged for run in listed]
    return AllocatorSummary(
        segments=tuple(int(segment["total_size"]) for segment in segments[:max_segments]),
        blocks=tuple(blocks),
        num_segments=len(segments),
        reserved=reserved,
        in_use=sum(size for _, size, state in runs if state == IN_USE),
        largest_free=max((size for _, size, state in runs if state == FREE), default=0),
    )


BlockRun = tuple[int, int, int]
"""Offset, size and state of adjacent blocks."""


def _merge_states(blocks: Sequence[Mapping[str, Any]]) -> Iterator[BlockRun]:
    """Yield the blocks of a segment, in order, with adjacent blocks of the same state merged."""
    offset, size, state = 0, 0, FREE
    for block in blocks:
        # For freed blocks that a stream still uses, torch's documentation and its snapshots have different names.
        block_state = _STATES.get(block["state"], AWAITING_FREE)
        if block_state != state and size:
            yield offset, size, state
            offset, size = offset + size, 0
        state = block_state
        size += int(block["size"])
    if size:
        yield offset, size, state


def _merge_small(runs: Iterable[BlockRun], smallest: int) -> Iterator[BlockRun]:
    """Yield the runs; adjacent ones below ``smallest`` bytes are merged until the merged run is large enough."""
    small: list[BlockRun] = []
    num_bytes = 0
    for run in runs:
        if run[1] >= smallest or num_bytes >= smallest:
            yield from _merge_all(small)
            small, num_bytes = [], 0
        if run[1] >= smallest:
            yield run
        else:
            small.append(run)
            num_bytes += run[1]
    yield from _merge_all(small)


def _merge_all(runs: Sequence[BlockRun]) -> Iterator[BlockRun]:
    if runs:
        yield runs[0][0], sum(size for _, size, _ in runs), runs[0][2] if len(runs) == 1 else MIXED
