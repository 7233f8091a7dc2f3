"""The rank of this process, and the number of processes that train together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class World:
    """The rank of one process among ``size`` processes, and its device; plain data, no torch.

    ``device`` is a torch device string such as ``"cpu"`` or ``"cuda:1"``.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    device: str = "cpu"

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is outside of a world of {self.size}")
        if not 0 <= self.local_rank < self.local_size <= self.size:
            raise ValueError(f"local rank {self.local_rank} of {self.local_size} does not fit a world of {self.size}")

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0 of the whole world."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Whether this is the first rank of its machine."""
        return self.local_rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the highest rank."""
        return self.rank == self.size - 1
