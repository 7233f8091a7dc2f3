"""Detection of hangs: finds the rank that the others wait for, and reports its position.

When a request has been silent for a while, the kernel queries each rank: the rank's monitor thread reports the position
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
from accel_nb.pool.messages import QueryPosition, RankPosition

SILENCE_S = 2.0
"""How long a request may be silent before ranks are queried."""
QUERY_INTERVAL_S = 1.0
"""The interval between queries; a position that is the same in two of them is reported."""
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
    _places: dict[int, RankPosition] = field(default_factory=dict)
    _places_before: dict[int, RankPosition] = field(default_factory=dict)
    _observed: dict[int, ObservedState] = field(default_factory=dict)
    _stack_pending: set[int] = field(default_factory=set)
    _ended: dict[int, RankPosition] = field(default_factory=dict)
    _reported: set[str] = field(default_factory=set)

    def record_progress(self) -> None:
        """Record that a rank has printed, measured or ended, which shows that the request makes progress."""
        self._last_progress_at, self._queried_at = self.clock(), None
        self._places, self._places_before, self._observed, self._stack_pending = {}, {}, {}, set()

    def record_position(self, rank: int, place: RankPosition) -> None:
        """Record the position that a rank has reported."""
        (self._ended if place.has_ended else self._places)[rank] = place

    def record_observed(self, state: ObservedState) -> None:
        """Record the state of a rank as observed from outside."""
        self._observed[state.rank] = state

    def update(self, waiting: set[int]) -> None:
        """Query the ranks, and report positions that did not change since the query before, if it is due."""
        now = self.clock()
        if self._last_progress_at is None:
            self._last_progress_at = now
        if now - max(self._last_progress_at + SILENCE_S - QUERY_INTERVAL_S, self._queried_at or 0.0) < QUERY_INTERVAL_S:
            return
        if self._queried_at is not None:
            self._report(waiting)
            self._places_before, self._places = self._places, {}
        unanswered = waiting - self._places_before.keys() if self._queried_at is not None else set()
        self._queried_at = now
        for rank in range(self.size):
            self.engine.send(rank, QueryPosition(self.number, from_outside=rank in unanswered), urgent=True)

    def _find_ended_peers(self, still: Mapping[int, RankPosition], waiting: set[int]) -> dict[int, str]:
        """Return a line, by rank, if all running ranks wait and the request has ended on others."""
        ended = sorted(set(range(self.size)) - waiting)
        if not ended or still.keys() != waiting or not all(place.is_waiting for place in still.values()):
            return {}
        rank, place = min(still.items())
        what = "a collective" if place.sequence is None else _collective(place)
        never = "have ended and do not come" if len(ended) > 1 else "has ended and does not come"
        advice = f"{'' if self.is_stuck else 'interrupt, and '}look for a branch that only some ranks take"
        return {ended[0]: f"rank {rank} waits in {what} {_at(place)}; {ranks_text(ended)} {never}: {advice}"}

    def _is_deadlock(self, still: Mapping[int, RankPosition], waiting: set[int]) -> bool:
        """Return whether all running ranks are in collectives that can never complete.

        Each waits for a rank that has not entered its collective, and that is blocked itself or has ended; or all are
        in the same collective with different operations.
        """
        if still.keys() != waiting or not all(place.is_open for place in still.values()):
            return False
        blocked = [*still.values(), *self._ended.values()]
        return all(any(has_not_entered(other, place) for other in blocked) for place in still.values()) or (
            len(still) == self.size
            and len({(place.channel, place.sequence) for place in still.values()}) == 1
            and len({place.operation for place in still.values()}) > 1
        )

    def _report(self, waiting: set[int]) -> None:
        still = {rank: place for rank, place in self._places.items() if self._places_before.get(rank) == place}
        self.is_stuck |= self._is_deadlock(still, waiting)
        lines = (
            find_missing(still, waiting - still.keys())
            or find_different(still)
            or self._find_ended_peers(still, waiting)
        )
        is_waited_for = any(place.is_waiting for place in still.values()) or len(waiting) < self.size
        for rank in sorted(waiting - self._places.keys() - self._places_before.keys()):
            observed = self._observed.get(rank)
            # A rank whose request has ended reports no position; it is packing its results.
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


def find_missing(places: Mapping[int, RankPosition], unsure: set[int]) -> dict[int, str]:
    """Return a line for each rank that has not entered a collective in which others wait.

    A rank that waits for these itself is left to `find_different`. Empty while the position of a rank in ``unsure`` is
    unknown.
    """
    if unsure:
        return {}
    lines: dict[int, str] = {}
    for late, place in places.items():
        waiting = {rank: other for rank, other in places.items() if other.is_waiting and has_not_entered(place, other)}
        if not waiting or any(_wait_for_each_other(place, other) for other in waiting.values()):
            continue
        newest = max(waiting.values(), key=_sequence)
        who = [
            rank
            for rank, other in waiting.items()
            if (other.channel, other.sequence) == (newest.channel, newest.sequence)
        ]
        lines[late] = (
            f"{ranks_text(who)} wait{'s' * (len(who) == 1)} in {_collective(newest)} for rank {late}, "
            f"which is {_at(place)}"
        )
    return lines


def find_different(places: Mapping[int, RankPosition]) -> dict[int, str]:
    """Return a line if ranks wait in different collectives."""
    waiting = {rank: place for rank, place in places.items() if place.is_waiting and place.sequence is not None}
    if not any(_are_different(one, other) for one, other in itertools.combinations(waiting.values(), 2)):
        return {}
    described = "; ".join(f"rank {rank}: {_collective(place)} {_at(place)}" for rank, place in sorted(waiting.items()))
    return {min(waiting): f"ranks wait in different collectives: {described}"}


def has_not_entered(other: RankPosition, place: RankPosition) -> bool:
    """Return whether a rank has not entered the collective at another one's ``place``, in which it takes part.

    A rank takes part in the collectives of all ranks, and in those of a group that it has entered before.
    """
    if place.channel is None:
        return False
    num_entered = other.entered.get(place.channel, 0 if place.is_of_all and not other.entered else None)
    return num_entered is not None and num_entered < place.entered[place.channel]


def _wait_for_each_other(one: RankPosition, other: RankPosition) -> bool:
    return one.is_waiting and other.is_waiting and has_not_entered(one, other) and has_not_entered(other, one)


def _are_different(one: RankPosition, other: RankPosition) -> bool:
    if (one.channel, one.sequence) == (other.channel, other.sequence):
        return (one.operation, one.sizes) != (other.operation, other.sizes)
    return _wait_for_each_other(one, other)


def _sequence(place: RankPosition) -> int:
    return -1 if place.sequence is None else place.sequence


def _collective(place: RankPosition) -> str:
    shape = f" of shape {place.sizes}" if str(place.sizes) != "[]" else ""  # a barrier has none
    return f"{place.operation} #{place.sequence}{shape}"


def _at(place: RankPosition) -> str:
    return f"at line {place.line} of {place.file}: {place.text}"


def _describe_unresponsive(rank: int, state: str, stack: str) -> str:
    why = "it is stopped (SIGSTOP)" if state in _STOPPED else "native code holds its interpreter lock"
    return "\n".join([f"rank {rank} does not answer: {why}", *([stack] if stack else [])])
