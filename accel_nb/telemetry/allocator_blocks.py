"""The allocator's segments and blocks on one device, condensed from a memory snapshot to a list of bounded length.

The allocator reserves segments of the device's memory and divides them into blocks. The format is that of
``torch.cuda.memory_snapshot()``. Plain data, imports no torch.
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
class BlockMap:
    """One device's memory at one moment, sizes in bytes; the largest segments, the largest first.

    ``segments`` are their sizes. ``blocks`` are (segment, offset, size, state), in the order of their addresses.
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
) -> BlockMap:
    """Return the map of one device out of a snapshot of all; at most about ``max_blocks`` blocks are listed.

    Neighbors of one state are merged. If there are still too many, small neighbors are merged to blocks of state
    ``MIXED``; large blocks keep position and size. The totals count everything.
    """
    segments = sorted(
        (segment for segment in snapshot if segment.get("device", device) == device),
        key=lambda segment: -int(segment["total_size"]),
    )
    merged = [list(_merged(segment["blocks"])) for segment in segments]
    reserved = sum(int(segment["total_size"]) for segment in segments)
    shown = merged[:max_segments]
    blocks: list[tuple[int, int, int, int]] = []
    total = sum(size for runs in shown for _, size, _ in runs)
    smallest = 2 * total // max(1, max_blocks - 3 * len(shown))
    is_too_long = sum(map(len, shown)) > max_blocks
    for index, runs in enumerate(shown):
        listed = _joined(runs, smallest) if is_too_long else runs
        blocks += [(index, offset, size, state) for offset, size, state in listed]
    runs = [run for listed in merged for run in listed]
    return BlockMap(
        segments=tuple(int(segment["total_size"]) for segment in segments[:max_segments]),
        blocks=tuple(blocks),
        num_segments=len(segments),
        reserved=reserved,
        in_use=sum(size for _, size, state in runs if state == IN_USE),
        largest_free=max((size for _, size, state in runs if state == FREE), default=0),
    )


BlockRun = tuple[int, int, int]
"""Offset, size and state."""


def _merged(blocks: Sequence[Mapping[str, Any]]) -> Iterator[BlockRun]:
    """Yield the blocks of a segment, in order, with neighbors of one state merged."""
    offset, size, state = 0, 0, FREE
    for block in blocks:
        # torch's documentation and its snapshots name the state of blocks that wait for a stream differently.
        found = _STATES.get(block["state"], AWAITING_FREE)
        if found != state and size:
            yield offset, size, state
            offset, size = offset + size, 0
        state = found
        size += int(block["size"])
    if size:
        yield offset, size, state


def _joined(runs: Iterable[BlockRun], smallest: int) -> Iterator[BlockRun]:
    """Yield runs with neighbors below ``smallest`` merged until the merged run is large enough."""
    waiting: list[BlockRun] = []
    num_bytes = 0
    for run in runs:
        if run[1] >= smallest or num_bytes >= smallest:
            yield from _as_one(waiting)
            waiting, num_bytes = [], 0
        if run[1] >= smallest:
            yield run
        else:
            waiting.append(run)
            num_bytes += run[1]
    yield from _as_one(waiting)


def _as_one(runs: Sequence[BlockRun]) -> Iterator[BlockRun]:
    if runs:
        yield runs[0][0], sum(size for _, size, _ in runs), runs[0][2] if len(runs) == 1 else MIXED
