"""Which parts stay on the device that computes: those with which a forward is expected to end soonest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, cycle, islice, product

from torch import nn

from accel_nb.bigmodel.host_memory import aligned
from accel_nb.bigmodel.planning.cost_model import ForwardTime, Pace, forward_time
from accel_nb.bigmodel.planning.module_tree import Tree
from accel_nb.bigmodel.planning.sizes import Device

AHEAD = 2
"""Room that is kept for weights on their way, in largest parts: one computes while the next arrives."""
_MOST_FORECASTS, _MOST_CHANGES = 1000, 30_000
"""Bounds on how long a plan may take to be made: about half a second for a hundred parts."""
_LESS = 1e-9
"""An improvement is more than this share: equal arrangements are not exchanged for each other."""
_READING_WEIGHT = 1e-3
"""Of two forwards that take as long, the one that reads less is better."""


@dataclass(frozen=True)
class Step:
    """A part of the model where a forward comes to it: what is read if it is away, and how long it computes."""

    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Part:
    """What goes to one place: a block, a module, or several of them that share tensors."""

    names: tuple[str, ...]
    steps: tuple[int, ...]
    """Where it comes in the order of a forward."""
    nbytes: int
    staying: int = 0
    """Bytes of it that stay on the device that computes wherever the rest lies."""


class Arrangement:
    """Parts that one device computes, the steps of a forward, and the bytes that each place has room for.

    ``room`` begins with that device. Steps that no part has are computed by others. Where the methods take places,
    these are one for each part.
    """

    def __init__(self, parts: Sequence[Part], steps: Sequence[Step], room: Mapping[Device, float], pace: Pace) -> None:
        self.parts = parts
        self._steps = steps
        self._room = room
        self._main = next(iter(room))
        self._pace = pace
        self._largest = [max((steps[at].nbytes for at in part.steps), default=0) for part in parts]
        self._from_largest = sorted(range(len(parts)), key=lambda at: -self._largest[at])

    def fits(self, places: Sequence[Device]) -> bool:
        """Whether every place has room for its parts, and the computing device for what comes to it."""
        used = dict.fromkeys(self._room, 0)
        for part, place in zip(self.parts, places, strict=True):
            used[place] += part.nbytes
            if place != self._main:
                used[self._main] += part.staying
        used[self._main] += self._buffers(places)
        return all(nbytes <= self._room[place] for place, nbytes in used.items())

    def time(self, places: Sequence[Device]) -> ForwardTime:
        """Return how long a forward is expected to take."""
        reading = [0.0] * len(self._steps)
        for part, place in zip(self.parts, places, strict=True):
            if place != self._main:
                for at in part.steps:
                    reading[at] = self._steps[at].nbytes / self._pace.bytes_per_s(place)
        return forward_time(
            [step.seconds for step in self._steps],
            reading,
            [step.nbytes for step in self._steps],
            self._buffers(places),
            beside=self._pace.reads_beside,
        )

    def starts(self) -> Iterator[list[Device]]:
        """Yield places that fit: what is larger than each size stays, and more as long as there is room."""
        *faster, slowest = self._room
        for size in sorted(set(self._largest)):
            places = [self._main if largest > size else slowest for largest in self._largest]
            if not self.fits(places):
                continue
            for at in self._from_largest:
                for place in faster if places[at] == slowest else ():
                    before, places[at] = places[at], place
                    if self.fits(places):
                        break
                    places[at] = before
            yield places

    def improved(self, places: Sequence[Device]) -> list[Device]:
        """Return places that fit, found by changing one or two at a time while a forward gets faster by it."""
        best, now = list(places), self.time(places)
        computing = sum(step.seconds for step in self._steps)
        reads = [{place: self._reading(at, place) for place in self._room} for at in range(len(best))]
        changes = list(islice(self._changes(), _MOST_CHANGES))
        num_left, num_in_vain = _MOST_FORECASTS, 0
        for change in islice(cycle(changes), 3 * _MOST_CHANGES):
            if num_in_vain == len(changes) or not num_left:
                break
            num_in_vain += 1
            reading = now.reading
            for at, place in change:
                reading += reads[at][place] - reads[at][best[at]]
            least = max(computing, reading) if self._pace.reads_beside else computing + reading
            if not is_better(ForwardTime(least, reading, computing), now):
                continue
            other = list(best)
            for at, place in change:
                other[at] = place
            if self.fits(other):
                num_left -= 1
                if is_better(found := self.time(other), now):
                    best, now, num_in_vain = other, found, 0
        return best

    def _changes(self) -> Iterator[Sequence[tuple[int, Device]]]:
        """Yield all changes of one part's place, and of two parts'."""
        for count in (1, 2, 3):
            for chosen in combinations(range(len(self.parts)), count):
                for places in product(self._room, repeat=count):
                    yield tuple(zip(chosen, places, strict=True))

    def _reading(self, at: int, place: Device) -> float:
        if place == self._main:
            return 0.0
        return sum(self._steps[step].nbytes for step in self.parts[at].steps) / self._pace.bytes_per_s(place)

    def _buffers(self, places: Sequence[Device]) -> int:
        """Return the room that weights on their way take."""
        away = (at for at in self._from_largest if places[at] != self._main)
        largest = next(away, None)
        if largest is None:
            return 0
        is_alone = len(self.parts[largest].steps) == 1 and next(away, None) is None
        return (1 if is_alone else AHEAD) * self._largest[largest]


def is_better(one: ForwardTime, other: ForwardTime) -> bool:
    """Whether one arrangement is to be preferred to another."""
    cost = other.seconds + _READING_WEIGHT * other.reading
    return one.seconds + _READING_WEIGHT * one.reading < cost * (1 - _LESS)


def arrangement(
    tree: Tree,
    places: Mapping[str, Device],
    room: Mapping[Device, float],
    pace: Pace,
    flops: Mapping[str, int],
    *,
    offload_buffers: bool,
) -> Arrangement:
    """Return what one device computes of a model; ``places`` are those of the smallest parts of the tree.

    ``flops`` are those of modules, by name; a part that is not among them goes through its weights once.
    """
    order = tree.smallest("")
    steps: list[Step] = []
    for name in order:
        held = [tree.held[index] for index in tree.inside(name)]
        nbytes = sum(aligned(one.nbytes) for one in held if offload_buffers or not one.is_buffer)
        # A look-up touches few rows of its table.
        touched = 0 if isinstance(tree.modules.get(name), nn.Embedding) else nbytes
        steps.append(Step(nbytes, pace.seconds(flops.get(name, 0), touched)))
    parts: list[Part] = []
    known: set[str] = set()
    for name in order:
        if name in known or places[name] not in room:
            continue
        family = {name, *(other for other in tree.family(name) if other in places)}
        known |= family
        inside = [tree.held[index] for index in set().union(*(tree.inside(other) for other in family))]
        staying = sum(held.nbytes for held in inside if held.is_buffer and not offload_buffers)
        nbytes = sum(aligned(held.nbytes) for held in inside)
        own = tuple(at for at, other in enumerate(order) if other in family)
        parts.append(Part(tuple(sorted(family, key=lambda other: (other != name, other))), own, nbytes, staying))
    return Arrangement(parts, steps, room, pace)
