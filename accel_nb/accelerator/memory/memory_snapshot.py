"""Memory snapshot of one rank's device at the end of a step: the allocator's blocks, and the largest objects."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from accel_nb.accelerator.core import Accelerator
from accel_nb.accelerator.memory.post_mortem import attribute_memory, largest_holders
from accel_nb.telemetry.allocator_blocks import condense_snapshot
from accel_nb.telemetry.events import MemorySnapshot

MAX_HOLDERS = 8


def make_memory_snapshot(
    snapshot: Iterable[Mapping[str, Any]],
    accelerators: Sequence[Accelerator],
    namespace: Mapping[str, Any],
    *,
    rank: int,
    step: int,
    device: torch.device | str,
    source: str,
) -> MemorySnapshot:
    """Return the event with a condensed snapshot of a device's allocator.

    ``source`` is the cell's text, to find the line at which a name was bound. Traverses all objects that are
    reachable from names, so it is slow: call it on request only.
    """
    device = torch.device(device)
    found = condense_snapshot(snapshot, device.index or 0)
    attribution, _ = attribute_memory(accelerators, namespace, device=device, source=source)
    holders = largest_holders(attribution, MAX_HOLDERS)
    return MemorySnapshot(
        rank=rank,
        step=step,
        time=time.time(),
        num_segments=found.num_segments,
        reserved=found.reserved,
        in_use=found.in_use,
        largest_free=found.largest_free,
        segments=found.segments,
        blocks=tuple(number for block in found.blocks for number in block),
        holders=tuple(name.strip("`") for name, _ in holders),
        holder_bytes=tuple(size for _, size in holders),
    )
