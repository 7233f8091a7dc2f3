"""Time use of each rank: shares of recent time, the rank that others wait for, and advice."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from accel_nb.telemetry.events import TimeUsed
from accel_nb.ui.messages import TimeShares

RECENT = 25
"""Number of records that the shares of a running cell are computed from: five seconds."""
MIN_S = 1.0
"""No share, straggler or advice is computed from less time."""
STRAGGLER_SHARE = 0.2
"""A rank is waited for if the others are blocked for this much more of their time than it is."""
READING_SHARE = 0.3
QUEUED_SHARE = 0.25
"""Larger shares of reading, and of waiting for a processor, are worth advice."""

_Durations = tuple[float, float, float, float]


@dataclass(slots=True)
class _RankTime:
    recent: deque[_Durations] = field(default_factory=lambda: deque(maxlen=RECENT))
    total: _Durations = (0.0, 0.0, 0.0, 0.0)


class TimeUse:
    """The time of all ranks of one run."""

    def __init__(self) -> None:
        self._ranks: dict[int, _RankTime] = {}
        self.is_over = False
        """Whether shares are those of the total run instead of recent time."""

    def add(self, event: TimeUsed) -> None:
        """Add a record. Raise ValueError for durations that are not finite numbers of at least 0."""
        durations = tuple(float(part) for part in (event.reading_s, event.computing_s, event.blocked_s, event.queued_s))
        if not all(0 <= part < 1e9 for part in durations):
            raise ValueError("durations are finite and not negative")
        rank = self._ranks.setdefault(event.rank, _RankTime())
        reading, computing, blocked, queued = durations
        rank.recent.append((reading, computing, blocked, queued))
        known = rank.total
        rank.total = known[0] + reading, known[1] + computing, known[2] + blocked, known[3] + queued

    def shares(self, rank: int) -> TimeShares | None:
        """Return the parts of a rank's time, which sum up to 1; None before enough of it is known."""
        if rank not in self._ranks:
            return None
        durations = self._ranks[rank]
        sums = durations.total if self.is_over else tuple(map(sum, zip(*durations.recent, strict=True)))
        total = sum(sums)
        if total < MIN_S:
            return None
        reading, computing, blocked, queued = (part / total for part in sums)
        return {"reading": reading, "computing": computing, "blocked": blocked, "queued": queued}

    def straggler(self) -> int | None:
        """Return the rank that all others wait for; None if there is none, or if waiting is not measured."""
        blocked = {rank: shares["blocked"] for rank in self._ranks if (shares := self.shares(rank)) is not None}
        if len(blocked) < 2:
            return None
        slowest = min(blocked, key=lambda rank: blocked[rank])
        least = min(share for rank, share in blocked.items() if rank != slowest)
        return slowest if least - blocked[slowest] > STRAGGLER_SHARE else None

    def advice(self) -> list[str]:
        """Return changes that would save time, one line each."""
        shares = {rank: found for rank in sorted(self._ranks) if (found := self.shares(rank)) is not None}
        lines: list[str] = []
        if (slowest := self.straggler()) is not None:
            waiting = min(found["blocked"] for rank, found in shares.items() if rank != slowest)
            lines.append(f"the other ranks wait for rank {slowest}, at least {waiting:.0%} of their time")
        if shares:
            rank = max(shares, key=lambda rank: shares[rank]["reading"])
            if (share := shares[rank]["reading"]) > READING_SHARE:
                lines.append(f"rank {rank} reads data {share:.0%} of its time: num_workers of a DataLoader read ahead")
            rank = max(shares, key=lambda rank: shares[rank]["queued"])
            if (share := shares[rank]["queued"]) > QUEUED_SHARE:
                lines.append(f"rank {rank} has no free processor {share:.0%} of its time: use fewer workers")
        return lines
