"""Detects hangs: finds the rank that the others wait for, and reports its position.

When a request has been silent for a while, each rank is queried: its monitor thread reports the position of the main
thread, independently of collectives. Ranks that entered a collective which others have not entered wait for these. A
rank that cannot report (stopped, or native code holds its interpreter lock) is observed from outside. A rank is never
ended for being slow: there may be a good reason. Only ranks that wait for one whose request is over, or that are in
different operations, can never continue; `HangDetector.is_stuck` is then true.
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
    """Watches one request for hangs; `turn` is called in each turn of the waiting loop."""

    engine: Engine
    number: int
    size: int
    report: Callable[[int, str], None]
    """Called with the rank that others wait for, and a line about it."""
    is_stuck: bool = False
    """Whether all running ranks wait in collectives that can never complete: a rank has ended, or operations differ."""
    clock: Callable[[], float] = time.monotonic
    _heard_at: float | None = None
    _asked_at: float | None = None
    _places: dict[int, RankPosition] = field(default_factory=dict)
    _before: dict[int, RankPosition] = field(default_factory=dict)
    _seen: dict[int, ObservedState] = field(default_factory=dict)
    _unread: set[int] = field(default_factory=set)
    _gone: dict[int, RankPosition] = field(default_factory=dict)
    _reported: set[str] = field(default_factory=set)

    def record_progress(self) -> None:
        """Record that a rank has printed, measured or ended: the request makes progress."""
        self._heard_at, self._asked_at = self.clock(), None
        self._places, self._before, self._seen, self._unread = {}, {}, {}, set()

    def record_position(self, rank: int, place: RankPosition) -> None:
        """Record the position that a rank has reported."""
        (self._gone if place.has_ended else self._places)[rank] = place

    def record_observed(self, look: ObservedState) -> None:
        """Record the state of a rank as observed from outside."""
        self._seen[look.rank] = look

    def update(self, waiting: set[int]) -> None:
        """Query, compare and report, if it is due."""
        now = self.clock()
        if self._heard_at is None:
            self._heard_at = now
        if now - max(self._heard_at + SILENCE_S - QUERY_INTERVAL_S, self._asked_at or 0.0) < QUERY_INTERVAL_S:
            return
        if self._asked_at is not None:
            self._report(waiting)
            self._before, self._places = self._places, {}
        mute = waiting - self._before.keys() if self._asked_at is not None else set()
        self._asked_at = now
        for rank in range(self.size):
            self.engine.send(rank, QueryPosition(self.number, from_outside=rank in mute), urgent=True)

    def _find_ended_peers(self, still: Mapping[int, RankPosition], waiting: set[int]) -> dict[int, str]:
        """Return a line if all running ranks wait and others have ended the request."""
        ended = sorted(set(range(self.size)) - waiting)
        if not ended or still.keys() != waiting or not all(place.is_waiting for place in still.values()):
            return {}
        self.is_stuck = all(any(_is_missing(gone, place) for gone in self._gone.values()) for place in still.values())
        rank, place = min(still.items())
        what = "a collective" if place.sequence is None else _collective(place)
        return {
            ended[0]: f"rank {rank} waits in {what} {_at(place)}; rank {', '.join(map(str, ended))} has ended and does "
            f"not come: {'' if self.is_stuck else 'interrupt, and '}look for a branch that only some ranks take"
        }

    def _report(self, waiting: set[int]) -> None:
        still = {rank: place for rank, place in self._places.items() if self._before.get(rank) == place}
        lines = (
            find_missing(still, waiting - still.keys())
            or find_different(still)
            or self._find_ended_peers(still, waiting)
        )
        self.is_stuck |= len(still) == self.size and _differ(still.values())
        is_waited_for = any(place.is_waiting for place in still.values()) or len(waiting) < self.size
        for rank in sorted(waiting - self._places.keys() - self._before.keys()):
            look = self._seen.get(rank)
            if look is None or not (is_waited_for or look.state in _STOPPED):
                continue
            stack = look.read_stack().strip()
            if stack or look.state in _STOPPED or rank in self._unread:
                lines[rank] = _describe_unresponsive(rank, look.state, stack)
            else:
                self._unread.add(rank)  # on a busy machine it may not have written yet: try once more
        for rank, line in lines.items():
            if line not in self._reported:
                self._reported.add(line)
                self.report(rank, line)


def find_missing(places: Mapping[int, RankPosition], unsure: set[int]) -> dict[int, str]:
    """Return a line for each rank that has not entered the collective that others wait in."""
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
    """Return whether a rank is inside of a collective of all ranks."""
    return place.is_open and place.is_of_all


def _differ(places: Collection[RankPosition]) -> bool:
    """Return whether all ranks are in the collective of the same number, and operations differ."""
    are_in_one = all(map(_is_in_global_collective, places)) and len({place.sequence for place in places}) == 1
    return are_in_one and len({place.operation for place in places}) > 1


def _is_missing(gone: RankPosition, place: RankPosition) -> bool:
    """Return whether a rank has ended its request without entering the collective that another one is in."""
    if not _is_in_global_collective(place) or gone.group not in (None, place.group):
        return False
    return _sequence(gone) < _sequence(place)


def find_different(places: Mapping[int, RankPosition]) -> dict[int, str]:
    """Return a line if ranks wait in different collectives with the same sequence number."""
    waiting = {rank: place for rank, place in places.items() if place.is_waiting and place.sequence is not None}
    kinds = {(place.operation, str(place.sizes)) for place in waiting.values()}
    if len({place.sequence for place in waiting.values()}) != 1 or len(kinds) < 2:
        return {}
    said = "; ".join(f"rank {rank}: {_collective(place)} {_at(place)}" for rank, place in sorted(waiting.items()))
    return {min(waiting): f"ranks wait in different collectives: {said}"}


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
