"""The arrangement of the ranks of a world in dimensions: copies and parts of a model, and parts of its layers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from accel_nb.errors import ConfigError

DIMENSIONS = ("dp_replicate", "dp_shard", "tp")
"""The dimensions, outermost first: the ranks of the last one are adjacent. Others follow the order of DESIGN.md, in
which the pipeline is the outermost and the context lies between ``dp_shard`` and ``tp``."""

DATA_DIMENSIONS = ("dp_replicate", "dp_shard")
"""The dimensions whose ranks read different samples."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """The place of one rank in a grid of ``dp_replicate`` x ``dp_shard`` x ``tp`` ranks; plain data, no torch.

    Ranks that differ in ``dp_replicate`` hold copies of the same parameters, those that differ in ``dp_shard`` hold
    different parts of each parameter, and those that differ in ``tp`` compute different parts of each divided layer.

    What depends on which coordinate: shares of the data and random numbers on the *data index* (of ``dp_replicate``
    and ``dp_shard``), so that all ranks of ``tp`` compute the same activations; logging, files and messages on the
    rank of the world.
    """

    rank: int = 0
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is outside of a mesh of {self.size}")

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of ranks in each of `DIMENSIONS`."""
        return tuple(getattr(self, name) for name in DIMENSIONS)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.shape)

    @property
    def coordinates(self) -> tuple[int, ...]:
        """The index of this rank in each of `DIMENSIONS`."""
        return unravel(self.rank, self.shape)

    @property
    def num_data(self) -> int:
        """The number of shares into which a batch is divided."""
        return self.dp_replicate * self.dp_shard

    @property
    def data_index(self) -> int:
        """The index of this rank's share of a batch."""
        return self.rank // self.tp

    @property
    def tp_index(self) -> int:
        """The index of this rank's part of a divided layer."""
        return self.rank % self.tp

    @property
    def data_ranks(self) -> tuple[int, ...]:
        """The ranks that hold the same parts of layers as this one, one for each share of the data."""
        return tuple(range(self.tp_index, self.size, self.tp))

    @property
    def tp_ranks(self) -> tuple[int, ...]:
        """The ranks that read the same data as this one, one for each part of a layer."""
        first = self.rank - self.tp_index
        return tuple(range(first, first + self.tp))

    def describe(self) -> str:
        """Return the number of ranks in each dimension that has several, as in "dp_replicate 2 x tp 2"."""
        sizes = zip(DIMENSIONS, self.shape, strict=True)
        return " x ".join(f"{name} {size}" for name, size in sizes if size > 1)

    def describe_rank(self) -> str:
        """Return this rank's coordinates, as in "dp 1, tp 0"."""
        return f"dp {self.data_index}, tp {self.tp_index}"


def unravel(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the coordinates of the item ``index`` of a grid whose last dimension varies fastest."""
    found: list[int] = []
    for length in reversed(shape):
        index, place = divmod(index, length)
        found.append(place)
    return tuple(reversed(found))


def arrange(rank: int, size: int, tp: int, shard: int | None) -> Mesh:
    """Return the mesh of ``size`` ranks: ``tp`` for each layer, and of the rest ``shard`` for each copy of the model.

    With None all of the rest hold one copy. Raises `ConfigError` for numbers that do not divide.
    """
    if size % tp:
        raise ConfigError(f"mesh.tp is {tp}, which does not divide the {size} workers; use {factors(size)}")
    rest = size // tp
    shard = shard or rest
    if rest % shard:
        workers = f"{rest} workers" if tp == 1 else f"{rest} workers that {size} leave for mesh.tp {tp}"
        raise ConfigError(
            f"fsdp.hybrid_shard_size is {shard}, which does not divide the {workers}; use one of {factors(rest)}"
        )
    return Mesh(rank, rest // shard, shard, tp)


def factors(size: int) -> str:
    """Return the numbers that divide ``size``, as text."""
    return ", ".join(str(number) for number in range(1, size + 1) if size % number == 0)
