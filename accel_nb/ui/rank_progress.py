"""Progress of the ranks: devices, positions on the step axis, and throughput."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from accel_nb.ui.series_table import Table

RECENT = 32
"""The number of reports from which the throughput of a running cell is computed."""
PAUSE_RATIO = 4.0
"""A step longer than this multiple of its curve's median is a pause, such as an evaluation; rates exclude it."""
STRAGGLER_RATIO = 1.25
STRAGGLER_MS = 1.0


@dataclass(frozen=True, slots=True)
class Throughput:
    """Number of steps and samples and their time, without the first step of each curve and without pauses."""

    num_steps: float = 0
    num_samples: float = 0
    time_s: float = 0.0

    @property
    def step_ms(self) -> float | None:
        """The mean duration of a step; None before the second."""
        return self.time_s / self.num_steps * 1e3 if self.num_steps else None

    @property
    def samples_per_s(self) -> float:
        """The rate; zero before the second step."""
        return self.num_samples / self.time_s if self.time_s > 0 else 0.0


@dataclass(slots=True)
class RankProgress:
    """Progress of one rank."""

    device: str = ""
    place: str = ""
    """The rank's place in a mesh of several dimensions; empty if there is one."""
    offset: float = 0.0
    last_x: float = -math.inf
    last_step: float = -math.inf
    first_time: float = math.nan
    last_time: float = math.nan
    num_samples: int = 0
    num_steps: int = 0
    is_nan: bool = False
    process_growth: float | None = None
    """Bytes that a CPU worker's process has allocated since its first step; None on other devices."""
    num_by_curve: dict[str, int] = field(default_factory=dict)
    # Curve, steps, samples and duration of a step for each recent report. The first report of each curve is left out,
    # since its duration includes the start.
    recent: deque[tuple[str, int, int, float]] = field(default_factory=lambda: deque(maxlen=RECENT))
    # The throughput over the whole run; None while it runs.
    final: Throughput | None = None

    @property
    def throughput(self) -> Throughput:
        """The throughput of the recent steps, or of the whole run once it has ended."""
        if self.final is not None:
            return self.final
        by_curve: dict[str, list[tuple[int, int, float]]] = {}
        for curve, num_steps, num_samples, step_s in self.recent:
            by_curve.setdefault(curve, []).append((num_steps, num_samples, step_s))
        total = Throughput()
        for rows in by_curve.values():
            limit = PAUSE_RATIO * statistics.median(step_s for _, _, step_s in rows)
            for num_steps, num_samples, step_s in rows:
                if step_s <= limit:
                    total = Throughput(
                        total.num_steps + num_steps, total.num_samples + num_samples, total.time_s + num_steps * step_s
                    )
        return total

    def move_to(self, step: float) -> bool:
        """Set the position on the step axis, and return whether the count of steps has restarted, as in a second loop.

        The axis then continues after the first loop.
        """
        x = step + self.offset
        has_restarted = x <= self.last_x and step < self.last_step
        if x <= self.last_x:
            self.offset += self.last_x + 1 - x
            x = self.last_x + 1
        self.last_x, self.last_step = x, step
        return has_restarted

    def record_time(self, time: float, step_s: float) -> None:
        """Record the time of a report, and how long the step took that ended then."""
        if math.isnan(self.first_time):
            self.first_time = time - step_s
        self.last_time = time


class ProgressByRank(dict[int, RankProgress]):
    """Progress of every rank that has reported, and what is computed from all of them."""

    def of(self, rank: int) -> RankProgress:
        """Return the progress of a rank, new if it has not reported before."""
        return self.setdefault(rank, RankProgress())

    @property
    def num_steps(self) -> int:
        """The largest number of steps that a rank has made."""
        return max((progress.num_steps for progress in self.values()), default=0)

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second over all ranks: in recent steps, or in the whole run once it has ended."""
        return sum(progress.throughput.samples_per_s for progress in self.values()) or None

    @property
    def step_ms(self) -> float | None:
        """The slowest rank's step duration: in recent steps, or in the whole run once it has ended."""
        return max((ms for progress in self.values() if (ms := progress.throughput.step_ms) is not None), default=None)

    @property
    def elapsed_s(self) -> float:
        """The time from the start of the first step to the latest report."""
        known = [progress for progress in self.values() if not math.isnan(progress.last_time)]
        if not known:
            return 0.0
        return max(0.0, max(one.last_time for one in known) - min(one.first_time for one in known))

    def slowest(self) -> int | None:
        """Return the rank whose step takes clearly longer than the steps of other ranks; None if there is none."""
        medians = {rank: progress.throughput.step_ms for rank, progress in self.items() if len(progress.recent) >= 8}
        times = {rank: value for rank, value in medians.items() if value is not None}
        if len(times) < 2:
            return None
        slowest = max(times, key=lambda rank: times[rank])
        others_ms = statistics.median(value for rank, value in times.items() if rank != slowest)
        is_slow = times[slowest] > STRAGGLER_RATIO * others_ms and times[slowest] - others_ms > STRAGGLER_MS
        return slowest if is_slow else None


def throughput_of_run(tables: Sequence[Table]) -> Throughput | None:
    """Return a rank's throughput over all steps in its tables; None if none of them has a second step."""
    import numpy as np

    total = Throughput()
    if not tables:
        return None
    # The column of samples counts over all curves of the rank.
    ends = np.sort(np.concatenate([np.array(table.columns[4]) for table in tables]))
    for table in tables:
        rows = np.array([table.columns[0], table.columns[3], table.columns[4]])
        times_s = rows[1][1:] / 1e3
        if not len(times_s):
            continue
        before = ends[np.maximum(np.searchsorted(ends, rows[2][1:]) - 1, 0)]
        num_steps = np.diff(rows[0]) if len(tables) == 1 else np.ones(len(times_s))
        steady = times_s <= PAUSE_RATIO * np.median(times_s)
        total = Throughput(
            total.num_steps + float(num_steps[steady].sum()),
            total.num_samples + float((rows[2][1:] - before)[steady].sum()),
            total.time_s + float((num_steps * times_s)[steady].sum()),
        )
    return total if total.num_steps else None
