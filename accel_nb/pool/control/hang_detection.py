"""Detection of hangs: finds the rank that the others wait for, and reports its position.

When a request has been silent for a while, the kernel queries each rank: the rank's monitor thread reports the position
of its main thread, without collectives. Ranks that have entered a collective wait for those that have not. If a rank
cannot report (it is stopped, or native code holds its GIL), the zygote observes it from outside. A slow rank is never
killed: there may be a good reason. Only ranks that wait for one whose request has ended, or that are in different
operations, can never continue; `HangDetector.is_stuck` is then true.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

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
        self.is_stuck = all(any(_is_missing(gone, place) for gone in self._ended.values()) for place in still.values())
        rank, place = min(still.items())
        what = "a collective" if place.sequence is None else _collective(place)
        return {
            ended[0]: f"rank {rank} waits in {what} {_at(place)}; rank {', '.join(map(str, ended))} has ended and does "
            f"not come: {'' if self.is_stuck else 'interrupt, and '}look for a branch that only some ranks take"
        }

    def _report(self, waiting: set[int]) -> None:
        still = {rank: place for rank, place in self._places.items() if self._places_before.get(rank) == place}
        lines = (
            find_missing(still, waiting - still.keys())
            or find_different(still)
            or self._find_ended_peers(still, waiting)
        )
        self.is_stuck |= len(still) == self.size and _differ(still.values())
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
    """Return a line for each rank that has not entered the collective in which others wait.

    Empty while the position of a rank in ``unsure`` is unknown.
    """
    known = {rank: place for rank, place in places.items() if place.sequence is not None}
    if len({place.group for place in known.values()}) != 1 or unsure:
        return {}
    newest = max(map(_sequence, known.values()))
    waiting = [rank for rank, place in known.items() if place.sequence == newest]
    late = [rank for rank, place in known.items() if _sequence(place) < newest]
    if not late or not any(known[rank].is_waiting for rank in waiting):
        return {}
    what = _collective(known[waiting[0]])
    who = ", ".join(map(str, waiting))
    return {
        rank: f"rank {who} wait{'s' * (len(waiting) == 1)} in {what} for rank {rank}, which is {_at(known[rank])}"
        for rank in late
    }


def _is_in_global_collective(place: RankPosition) -> bool:
    """Return whether a rank is inside of a collective in which all ranks take part."""
    return place.is_open and place.is_of_all


def _differ(places: Collection[RankPosition]) -> bool:
    """Return whether all ranks are in the collective with the same sequence number and the operations differ."""
    are_in_one = all(map(_is_in_global_collective, places)) and len({place.sequence for place in places}) == 1
    return are_in_one and len({place.operation for place in places}) > 1


def _is_missing(gone: RankPosition, place: RankPosition) -> bool:
    """Return whether the request ended on a rank before the rank entered the collective that another one is in.

    ``gone`` is the last position of the first rank, ``place`` the position of the other.
    """
    if not _is_in_global_collective(place) or gone.group not in (None, place.group):
        return False
    return _sequence(gone) < _sequence(place)


def find_different(places: Mapping[int, RankPosition]) -> dict[int, str]:
    """Return a line if ranks wait in different collectives with the same sequence number."""
    waiting = {rank: place for rank, place in places.items() if place.is_waiting and place.sequence is not None}
    kinds = {(place.operation, str(place.sizes)) for place in waiting.values()}
    if len({place.sequence for place in waiting.values()}) != 1 or len(kinds) < 2:
        return {}
    described = "; ".join(f"rank {rank}: {_collective(place)} {_at(place)}" for rank, place in sorted(waiting.items()))
    return {min(waiting): f"ranks wait in different collectives: {described}"}


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
