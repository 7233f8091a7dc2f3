"""Detection of hangs: finds the rank that the others wait for, and reports its location.

When a request has been silent for a while, the kernel queries each rank: the rank's monitor thread reports the location
of its main thread, without collectives. Ranks that have entered a collective wait for those that have not. If a rank
cannot report (it is stopped, or native code holds its GIL), the zygote observes it from outside. A slow rank is never
killed: there may be a good reason. Only ranks that each wait for one whose request has ended or that waits itself, or
that are in different operations, can never continue; `HangDetector.is_stuck` is then true.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from accel_nb.config.message_text import ranks_text
from accel_nb.pool.engine import Engine, ObservedState
from accel_nb.pool.messages import QueryLocation, RankLocation

SILENCE_S = 2.0
"""How long a request may be silent before ranks are queried."""
QUERY_INTERVAL_S = 1.0
"""The interval between queries; a location that is the same in two of them is reported."""
_STOPPED = frozenset("Tt")


@dataclass(slots=True)
class HangDetector:
    """Detects hangs of one request; the pool calls `update` in each iteration of its waiting loop."""

    engine: Engine
    number: int
    size: int
    report: Callable[[int, str], None]
    """Called with the rank that others wait for, and a line about it."""
    is_stuck: bool = False
    """Whether all running ranks wait in collectives that can never complete: a rank has ended, or operations differ."""
    clock: Callable[[], float] = time.monotonic
    _last_progress_at: float | None = None
    _queried_at: float | None = None
    _locations: dict[int, RankLocation] = field(default_factory=dict)
    _earlier_locations: dict[int, RankLocation] = field(default_factory=dict)
    _observed: dict[int, ObservedState] = field(default_factory=dict)
    _stack_pending: set[int] = field(default_factory=set)
    _ended: dict[int, RankLocation] = field(default_factory=dict)
    _reported: set[str] = field(default_factory=set)

    def record_progress(self) -> None:
        """Record that a rank has printed, measured or ended, which shows that the request makes progress."""
        self._last_progress_at, self._queried_at = self.clock(), None
        self._locations, self._earlier_locations, self._observed, self._stack_pending = {}, {}, {}, set()

    def record_location(self, rank: int, location: RankLocation) -> None:
        """Record the location that a rank has reported."""
        (self._ended if location.has_ended else self._locations)[rank] = location

    def record_observed(self, state: ObservedState) -> None:
        """Record the state of a rank as observed from outside."""
        self._observed[state.rank] = state

    def update(self, waiting: set[int]) -> None:
        """Query the ranks, and report locations that did not change since the query before, if it is due."""
        now = self.clock()
        if self._last_progress_at is None:
            self._last_progress_at = now
        if now - max(self._last_progress_at + SILENCE_S - QUERY_INTERVAL_S, self._queried_at or 0.0) < QUERY_INTERVAL_S:
            return
        if self._queried_at is not None:
            self._report(waiting)
            self._earlier_locations, self._locations = self._locations, {}
        unanswered = waiting - self._earlier_locations.keys() if self._queried_at is not None else set()
        self._queried_at = now
        for rank in range(self.size):
            self.engine.send(rank, QueryLocation(self.number, from_outside=rank in unanswered), urgent=True)

    def _describe_ended_ranks(self, unchanged: Mapping[int, RankLocation], waiting: set[int]) -> dict[int, str]:
        """Return a line, by rank, if all running ranks wait and the request has ended on others."""
        ended = sorted(set(range(self.size)) - waiting)
        if not ended or unchanged.keys() != waiting or not all(location.is_waiting for location in unchanged.values()):
            return {}
        rank, location = min(unchanged.items())
        what = "a collective" if location.sequence is None else _collective(location)
        never = "have ended and do not enter it" if len(ended) > 1 else "has ended and does not enter it"
        advice = f"{'' if self.is_stuck else 'interrupt, and '}look for a branch that only some ranks take"
        return {ended[0]: f"rank {rank} waits in {what} {_at(location)}; {ranks_text(ended)} {never}: {advice}"}

    def _is_deadlock(self, unchanged: Mapping[int, RankLocation], waiting: set[int]) -> bool:
        """Return whether all running ranks are in collectives that can never complete.

        Each waits for a rank that has not entered its collective, and that is blocked itself or has ended; or all are
        in the same collective with different operations.
        """
        if unchanged.keys() != waiting or not all(location.is_open for location in unchanged.values()):
            return False
        blocked = [*unchanged.values(), *self._ended.values()]
        return all(any(has_not_entered(other, location) for other in blocked) for location in unchanged.values()) or (
            len(unchanged) == self.size
            and len({(location.channel, location.sequence) for location in unchanged.values()}) == 1
            and len({location.operation for location in unchanged.values()}) > 1
        )

    def _report(self, waiting: set[int]) -> None:
        unchanged = {
            rank: location
            for rank, location in self._locations.items()
            if self._earlier_locations.get(rank) == location
        }
        self.is_stuck |= self._is_deadlock(unchanged, waiting)
        lines = (
            describe_late_ranks(unchanged, waiting - unchanged.keys())
            or describe_different_collectives(unchanged)
            or self._describe_ended_ranks(unchanged, waiting)
        )
        is_waited_for = any(location.is_waiting for location in unchanged.values()) or len(waiting) < self.size
        for rank in sorted(waiting - self._locations.keys() - self._earlier_locations.keys()):
            observed = self._observed.get(rank)
            # A rank whose request has ended reports no location; it is packing its results.
            is_missed = is_waited_for and rank not in self._ended
            if observed is None or not (is_missed or observed.state in _STOPPED):
                continue
            stack = observed.read_stack().strip()
            if stack or observed.state in _STOPPED or rank in self._stack_pending:
                lines[rank] = _describe_unresponsive(rank, observed.state, stack)
            else:
                self._stack_pending.add(rank)  # on a busy machine its stack may be written later: read it once more
        for rank, line in lines.items():
            if line not in self._reported:
                self._reported.add(line)
                self.report(rank, line)


def describe_late_ranks(locations: Mapping[int, RankLocation], unsure: set[int]) -> dict[int, str]:
    """Return a line for each rank that has not entered a collective in which others wait.

    Ranks that wait for each other are left to `describe_different_collectives`. Empty while the location of a rank in
    ``unsure`` is unknown.
    """
    if unsure:
        return {}
    lines: dict[int, str] = {}
    for late, location in locations.items():
        waiting = {
            rank: other for rank, other in locations.items() if other.is_waiting and has_not_entered(location, other)
        }
        if not waiting or any(_wait_for_each_other(location, other) for other in waiting.values()):
            continue
        newest = max(waiting.values(), key=_sequence)
        who = [
            rank
            for rank, other in waiting.items()
            if (other.channel, other.sequence) == (newest.channel, newest.sequence)
        ]
        lines[late] = (
            f"{ranks_text(who)} wait{'s' * (len(who) == 1)} in {_collective(newest)} for rank {late}, "
            f"which is {_at(location)}"
        )
    return lines


def describe_different_collectives(locations: Mapping[int, RankLocation]) -> dict[int, str]:
    """Return a line if ranks wait in different collectives."""
    waiting = {
        rank: location for rank, location in locations.items() if location.is_waiting and location.sequence is not None
    }
    if not any(_are_different(one, other) for one, other in itertools.combinations(waiting.values(), 2)):
        return {}
    described = "; ".join(
        f"rank {rank}: {_collective(location)} {_at(location)}" for rank, location in sorted(waiting.items())
    )
    return {min(waiting): f"ranks wait in different collectives: {described}"}


def has_not_entered(other: RankLocation, location: RankLocation) -> bool:
    """Return whether a rank has not entered the collective at another one's ``location``, in which it takes part.

    A rank takes part in the collectives of all ranks, and in those of a group that it has entered before.
    """
    if location.channel is None:
        return False
    num_entered = other.entered.get(location.channel, 0 if location.includes_all_ranks and not other.entered else None)
    return num_entered is not None and num_entered < location.entered[location.channel]


def _wait_for_each_other(one: RankLocation, other: RankLocation) -> bool:
    return one.is_waiting and other.is_waiting and has_not_entered(one, other) and has_not_entered(other, one)


def _are_different(one: RankLocation, other: RankLocation) -> bool:
    if (one.channel, one.sequence) == (other.channel, other.sequence):
        return (one.operation, one.sizes) != (other.operation, other.sizes)
    return _wait_for_each_other(one, other)


def _sequence(location: RankLocation) -> int:
    return -1 if location.sequence is None else location.sequence


def _collective(location: RankLocation) -> str:
    shape = f" of shape {location.sizes}" if str(location.sizes) != "[]" else ""  # a barrier has none
    return f"{location.operation} #{location.sequence}{shape}"


def _at(location: RankLocation) -> str:
    return f"at line {location.line} of {location.file}: {location.text}"


def _describe_unresponsive(rank: int, state: str, stack: str) -> str:
    why = "it is stopped (SIGSTOP)" if state in _STOPPED else "native code holds its interpreter lock"
    return "\n".join([f"rank {rank} does not answer: {why}", *([stack] if stack else [])])
