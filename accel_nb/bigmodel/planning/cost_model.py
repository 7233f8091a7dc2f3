"""How long a forward takes whose weights are partly elsewhere: a model of reading beside computing."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from accel_nb.bigmodel.planning.sizes import Device
from accel_nb.errors import ConfigError

_FORWARDS = 3
"""The last of so many is timed: then what is read for the next one during this one has settled."""


@dataclass(frozen=True)
class Pace:
    """How fast a device computes, and how fast weights come to it: measured, or stated by who knows.

    ``flops_per_s`` for products of matrices; ``memory_bytes_per_s`` at which the device goes through weights that it
    holds; ``cpu_bytes_per_s`` and ``disk_bytes_per_s`` at which they come from memory and from disk.
    ``reads_beside``: reading leaves the computation its pace. A CPU that copies what the system has cached cannot
    compute meanwhile. Raises `ConfigError` for what is not above 0.
    """

    flops_per_s: float
    memory_bytes_per_s: float
    cpu_bytes_per_s: float
    disk_bytes_per_s: float
    reads_beside: bool = True

    def __post_init__(self) -> None:
        rates = ("flops_per_s", "memory_bytes_per_s", "cpu_bytes_per_s", "disk_bytes_per_s")
        if problems := [f"{name} is {getattr(self, name)!r}; give what is done in a second, above 0"
                        for name in rates if not getattr(self, name) > 0]:  # fmt: skip
            raise ConfigError(problems)

    @classmethod
    def typical(cls, main: Device) -> Pace:
        """Return that of common hardware: a server's CPU and its disk, or a GPU behind PCIe 4.0 with 16 lanes."""
        if str(main).startswith("cpu"):
            return cls(flops_per_s=1e12, memory_bytes_per_s=5e10, cpu_bytes_per_s=5e10, disk_bytes_per_s=2e9)
        return cls(flops_per_s=5e13, memory_bytes_per_s=1e12, cpu_bytes_per_s=2.5e10, disk_bytes_per_s=2e9)

    def bytes_per_s(self, place: Device) -> float:
        """Return how fast weights come from ``cpu`` or ``disk``."""
        return self.disk_bytes_per_s if place == "disk" else self.cpu_bytes_per_s

    def seconds(self, flops: int, nbytes: int) -> float:
        """Return how long a part computes: all of its weights are gone through at least once (the roofline model)."""
        return max(flops / self.flops_per_s, nbytes / self.memory_bytes_per_s)


@dataclass(frozen=True)
class ForwardTime:
    """How long a forward takes among others like it, in seconds."""

    seconds: float
    reading: float
    computing: float

    def __str__(self) -> str:
        waiting = max(0.0, self.seconds - self.computing)
        return (
            f"a forward is expected to take {self.seconds:.2g} s: {self.computing:.2g} s of computing and "
            f"{waiting:.2g} s of waiting for weights, which take {self.reading:.2g} s to read"
        )


def forward_time(
    computing: Sequence[float], reading: Sequence[float], sizes: Sequence[int], budget: int, *, beside: bool = True
) -> ForwardTime:
    """Return how long a forward takes that goes through parts in order, in the midst of others.

    For each part: seconds that it computes, seconds to read it (0 if it stays on the device), and its bytes. One after
    another is read as soon as the ``budget`` of buffers has room, which those take that are not over yet; ``beside``
    the computation, or when it has come there.
    """
    computed = read = before = 0.0
    held: deque[tuple[int, float]] = deque()
    free = budget
    for _ in range(_FORWARDS):
        before = computed
        for own, arrives, nbytes in zip(computing, reading, sizes, strict=True):
            if not arrives:
                computed += own
                continue
            start = read if beside else computed
            while free < nbytes and held:
                size, over = held.popleft()
                free += size
                start = max(start, over)
            read = start + arrives
            computed = max(computed, read) + own
            held.append((nbytes, computed))
            free -= nbytes
    return ForwardTime(computed - before, sum(reading), sum(computing))
