"""Cost model of a forward with offloaded weights: reads that overlap with the computation."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from accel_nb.bigmodel.planning.sizes import Device
from accel_nb.errors import ConfigError

_FORWARDS = 3
"""Simulated forwards, of which the last is timed: the prefetch across forwards is then in a steady state."""


@dataclass(frozen=True)
class Pace:
    """Speed of a device and of transfers to it, measured or given.

    ``flops_per_s`` of matrix products; ``memory_bytes_per_s`` of the device's memory; ``cpu_bytes_per_s`` and
    ``disk_bytes_per_s`` of transfers from host memory and from disk. ``reads_beside``: reads overlap with the
    computation without slowing it down; a CPU that copies from the page cache cannot compute meanwhile. Raises
    `ConfigError` for values that are not above 0.
    """

    flops_per_s: float
    memory_bytes_per_s: float
    cpu_bytes_per_s: float
    disk_bytes_per_s: float
    reads_beside: bool = True

    def __post_init__(self) -> None:
        rates = ("flops_per_s", "memory_bytes_per_s", "cpu_bytes_per_s", "disk_bytes_per_s")
        if problems := [f"{name} is {getattr(self, name)!r}; give a rate per second, above 0"
                        for name in rates if not getattr(self, name) > 0]:  # fmt: skip
            raise ConfigError(problems)

    @classmethod
    def typical(cls, main: Device) -> Pace:
        """Return typical values: a server CPU with its disk, or a GPU on PCIe 4.0 x16."""
        if str(main).startswith("cpu"):
            return cls(flops_per_s=1e12, memory_bytes_per_s=5e10, cpu_bytes_per_s=5e10, disk_bytes_per_s=2e9)
        return cls(flops_per_s=5e13, memory_bytes_per_s=1e12, cpu_bytes_per_s=2.5e10, disk_bytes_per_s=2e9)

    def bytes_per_s(self, place: Device) -> float:
        """Return the transfer rate from ``cpu`` or ``disk``."""
        return self.disk_bytes_per_s if place == "disk" else self.cpu_bytes_per_s

    def seconds(self, flops: int, nbytes: int) -> float:
        """Return the compute time of a part, by operations or memory traffic (the roofline model)."""
        return max(flops / self.flops_per_s, nbytes / self.memory_bytes_per_s)


@dataclass(frozen=True)
class ForwardTime:
    """The time of a forward in a sequence of equal ones, in seconds."""

    seconds: float
    read_s: float
    compute_s: float

    def __str__(self) -> str:
        waiting = max(0.0, self.seconds - self.compute_s)
        return (
            f"a forward is expected to take {self.seconds:.2g} s: {self.compute_s:.2g} s of computing and "
            f"{waiting:.2g} s of waiting for weights, which take {self.read_s:.2g} s to read"
        )


def forward_time(
    compute_times: Sequence[float],
    read_times: Sequence[float],
    sizes: Sequence[int],
    budget: int,
    *,
    overlaps: bool = True,
) -> ForwardTime:
    """Return the time of a forward over parts in order, in a sequence of forwards.

    For each part: its compute time and read time in seconds (read time 0 if it stays on the device), and its bytes.
    Parts are read in order as soon as the ``budget`` of buffers has space; a part's buffer is free when its computation
    has ended. With ``overlaps``, reads overlap with the computation; otherwise a part is read right before its use.
    """
    computed = read = before = 0.0
    buffered: deque[tuple[int, float]] = deque()
    free = budget
    for _ in range(_FORWARDS):
        before = computed
        for compute_s, read_s, nbytes in zip(compute_times, read_times, sizes, strict=True):
            if not read_s:
                computed += compute_s
                continue
            start = read if overlaps else computed
            while free < nbytes and buffered:
                size, computed_at = buffered.popleft()
                free += size
                start = max(start, computed_at)
            read = start + read_s
            computed = max(computed, read) + compute_s
            buffered.append((nbytes, computed))
            free -= nbytes
    return ForwardTime(computed - before, sum(read_times), sum(compute_times))
