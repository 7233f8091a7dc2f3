"""Gathering of complete tensors from the shards on the ranks, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from accel_nb.checkpoint.encoding import Slice
from accel_nb.checkpoint.layout import Region
from accel_nb.runtime.distributed.communicator import Communicator


def gather_weights(values: Mapping[str, Any], comm: Communicator) -> Iterator[tuple[str, Any]]:
    """Yield the items of a state dict with each `Slice` gathered from all ranks; every rank must iterate.

    Only one complete tensor exists at a time, unless the caller retains them.
    """
    own = {
        name: [list(value.offsets), list(value.tensor.shape)]
        for name, value in values.items()
        if isinstance(value, Slice)
    }
    per_rank = comm.all_gather_json(own) if own else []
    for name, value in values.items():
        if not isinstance(value, Slice):
            yield name, value
            continue
        regions = [Region(tuple(offsets), tuple(shape)) for offsets, shape in (found[name] for found in per_rank)]
        yield name, _gather(value, regions, comm)


def _gather(part: Slice, regions: list[Region], comm: Communicator) -> Tensor:
    flat = part.tensor.detach().reshape(-1)
    room = max(region.size for region in regions) - flat.numel()
    if room:
        flat = torch.cat([flat, flat.new_zeros(room)])
    result = flat.new_empty(part.shape)
    for region, found in zip(regions, comm.all_gather(flat), strict=True):
        box = tuple(slice(start, start + length) for start, length in zip(region.offsets, region.shape, strict=True))
        result[box] = found[: region.size].view(region.shape)
    return result
