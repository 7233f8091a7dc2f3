"""The positions of parameters in the flat tensors that a DeepSpeed engine steps, of which each rank has a shard."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from accel_nb.runtime.distributed.sharded import FlatShard
from accel_nb.runtime.world import World


@dataclass(frozen=True, slots=True)
class FlatSlot:
    """The position of this rank's shard of a parameter in a flat tensor: the index of its first element."""

    parameter: nn.Parameter
    start: int
    shard: FlatShard

    def narrow(self, flat: Tensor) -> Tensor:
        """Return this rank's shard of the parameter in a tensor of the flat tensor's layout."""
        return flat.detach().narrow(0, self.start, self.shard.ranges[self.shard.rank][1])


def find_flat_tensors(zero: Any, stage: int, world: World) -> Iterator[tuple[Any, list[FlatSlot]]]:
    """Yield the flat tensors that this rank steps by DeepSpeed's optimizer ``zero``, each with the parameters in it."""
    if stage == 3:
        for flat, parameters in zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True):
            start, places = 0, []
            for value in parameters:
                places.append(FlatSlot(value, start, shard_of(value, world)))
                start += value.partition_numel()
            yield flat, places
        return
    for flat, parameters in zip(zero.single_partition_of_fp32_groups, zero.bit16_groups, strict=True):
        size, offset, places = flat.numel(), 0, []
        for value in parameters:
            ranges = []
            for rank in range(world.size):
                low, high = max(offset, rank * size), min(offset + value.numel(), (rank + 1) * size)
                ranges.append((low - offset, high - low) if high > low else (0, 0))
            shard = FlatShard(tuple(value.shape), tuple(ranges), world.rank)
            places.append(FlatSlot(value, min(max(0, offset - world.rank * size), size), shard))
            offset += value.numel()
        yield flat, places


def shard_of(parameter: Any, world: World, values: Tensor | None = None) -> FlatShard:
    """Return this rank's shard of a parameter that stage 3 has sharded; ``values`` has its values."""
    size = parameter.partition_numel()
    starts = [min(rank * size, parameter.ds_numel) for rank in range(world.size)]
    ranges = [(start, min(size, parameter.ds_numel - start)) for start in starts]
    return FlatShard(tuple(parameter.ds_shape), tuple(ranges), world.rank, values)
