"""The arrangement of the ranks of a world in dimensions: replicas and shards of a model, and parts of its layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from accel_nb.errors import ConfigError

DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The dimensions, outermost first: the ranks of the last one are adjacent."""

DATA_DIMENSIONS = ("dp_replicate", "dp_shard")
"""The dimensions whose ranks read different samples."""

SUM_DIMENSIONS = (*DATA_DIMENSIONS, "cp")
"""The dimensions whose ranks compute gradients of the same parameters from different parts of a batch."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """The place of one rank in a grid of `DIMENSIONS`; plain data, no torch.

    Ranks that differ in ``pp`` compute different layers, in ``dp_replicate`` hold replicas of the same parameters, in
    ``dp_shard`` different shards of each parameter, in ``cp`` read different parts of each sequence, and in ``tp``
    compute different parts of each divided layer. Of the ranks with the same coordinates in ``pp`` and ``tp``, ``ep``
    adjacent ones hold different experts: they read different samples, or parts of a sequence.

    Shares of the data and random numbers depend on the *data index* (of ``dp_replicate`` and ``dp_shard``), so that all
    ranks of ``pp`` and ``tp`` compute the same activations, and the ranks of ``cp`` the same outside of their shards of
    sequences; logging, files and messages depend on the rank of the world.
    """

    rank: int = 0
    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

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

    def index(self, *dimensions: str) -> int:
        """Return the index of this rank in the grid of some dimensions, the last of which varies fastest."""
        own = self.coordinates
        found = 0
        for name in dimensions:
            found = found * getattr(self, name) + own[DIMENSIONS.index(name)]
        return found

    def groups_along(self, *dimensions: str) -> list[tuple[int, ...]]:
        """Return the groups of ranks that differ in these dimensions only, each in the order of `index`."""
        groups: dict[tuple[int, ...], list[Mesh]] = {}
        for rank in range(self.size):
            other = Mesh(rank, *self.shape)
            places = zip(DIMENSIONS, other.coordinates, strict=True)
            groups.setdefault(tuple(place for name, place in places if name not in dimensions), []).append(other)
        return [
            tuple(other.rank for other in sorted(group, key=lambda other: other.index(*dimensions)))
            for group in groups.values()
        ]

    def ranks_along(self, *dimensions: str) -> tuple[int, ...]:
        """Return the group of `groups_along` that has this rank."""
        return next(group for group in self.groups_along(*dimensions) if self.rank in group)

    @property
    def num_data(self) -> int:
        """The number of shares into which a batch is divided."""
        return self.dp_replicate * self.dp_shard

    @property
    def data_index(self) -> int:
        """The index of this rank's share of a batch."""
        return self.index(*DATA_DIMENSIONS)

    def parameter_mesh(self, *, copies: bool) -> Mesh:
        """Return the mesh of parameters: with ``copies`` the ranks of ``cp`` hold replicas of them, else shards."""
        if copies:
            return replace(self, dp_replicate=self.dp_replicate * self.cp, cp=1)
        return replace(self, dp_shard=self.dp_shard * self.cp, cp=1)

    @property
    def has_one_dimension(self) -> bool:
        """Whether ranks differ only in the samples that they read."""
        return self.size == self.num_data and self.ep == 1

    @property
    def expert_shape(self) -> tuple[int, int, int]:
        """The numbers of replicas of the experts, of shards of each expert, and of groups of experts.

        Valid for a mesh of parameters, see `parameter_mesh`.
        """
        if self.dp_shard % self.ep == 0:
            return self.dp_replicate, self.dp_shard // self.ep, self.ep
        return self.num_data // self.ep, 1, self.ep

    @property
    def counts_samples(self) -> bool:
        """Whether this is the one rank that counts the samples of its share of a batch."""
        return self.index("pp", "cp", "tp") == 0

    def describe(self) -> str:
        """Describe the dimensions with several ranks, as in "dp_replicate 2 x tp 2"."""
        sizes = [*zip(DIMENSIONS, self.shape, strict=True), ("ep", self.ep)]
        return " x ".join(f"{name} {size}" for name, size in sizes if size > 1)

    def describe_rank(self) -> str:
        """Return this rank's coordinates, as in "dp 1, tp 0"."""
        others = [name for name in DIMENSIONS if name not in DATA_DIMENSIONS and getattr(self, name) > 1]
        experts = [f"ep {self.index(*SUM_DIMENSIONS) % self.ep}"] if self.ep > 1 else []
        return ", ".join([f"dp {self.data_index}", *(f"{name} {self.index(name)}" for name in others), *experts])


def unravel(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the coordinates of the item ``index`` of a grid whose last dimension varies fastest."""
    found: list[int] = []
    for length in reversed(shape):
        index, place = divmod(index, length)
        found.append(place)
    return tuple(reversed(found))


def arrange_mesh(
    rank: int, size: int, *, pp: int = 1, cp: int = 1, tp: int = 1, ep: int = 1, shard: int | None = None
) -> Mesh:
    """Return the mesh of ``size`` ranks, of which ``pp`` x ``cp`` x ``tp`` compute together.

    ``shard`` of the rest shard a replica; with None all of the rest shard one replica. ``ep`` of the ranks without
    ``tp`` and ``pp`` hold different experts. Raises `ConfigError` for numbers that do not divide.
    """
    rest, taken = size, ""
    for name, degree in (("tp", tp), ("pp", pp), ("ep", ep), ("cp", cp)):
        if rest % degree:
            raise ConfigError(
                f"mesh.{name} is {degree}, which does not divide the {_workers(rest, size, taken)}; "
                f"use one of {factors(rest)}"
            )
        if name != "ep" and degree > 1:
            rest //= degree
            taken += f" and mesh.{name} {degree}"
    shard = shard or rest
    if rest % shard:
        raise ConfigError(
            f"fsdp.hybrid_shard_size is {shard}, which does not divide the {_workers(rest, size, taken)}; "
            f"use one of {factors(rest)}"
        )
    return Mesh(rank, pp, rest // shard, shard, cp, tp, ep)


def _workers(rest: int, size: int, taken: str) -> str:
    return f"{rest} workers that remain of {size} after{taken.removeprefix(' and')}" if taken else f"{size} workers"


def factors(size: int) -> str:
    """Return the numbers that divide ``size``, as text."""
    return ", ".join(str(number) for number in range(1, size + 1) if size % number == 0)
