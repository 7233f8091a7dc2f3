"""Progress of one rank: its device, position and the pace of its steps."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

RECENT = 32
"""The number of reports from which the pace of a running cell is computed."""
PAUSE_RATIO = 4.0
"""A step longer than this multiple of its curve's median is a pause, such as an evaluation; rates exclude it."""


@dataclass(frozen=True, slots=True)
class Pace:
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
    # The pace over the whole run; None while it runs.
    final: Pace | None = None

    @property
    def pace(self) -> Pace:
        """The pace of the recent steps, or of the whole run once it has ended."""
        if self.final is not None:
            return self.final
        by_curve: dict[str, list[tuple[int, int, float]]] = {}
        for curve, num_steps, num_samples, step_s in self.recent:
            by_curve.setdefault(curve, []).append((num_steps, num_samples, step_s))
        total = Pace()
        for rows in by_curve.values():
            limit = PAUSE_RATIO * statistics.median(step_s for _, _, step_s in rows)
            for num_steps, num_samples, step_s in rows:
                if step_s <= limit:
                    total = Pace(
                        total.num_steps + num_steps, total.num_samples + num_samples, total.time_s + num_steps * step_s
                    )
        return total
