"""Search for the parts that stay on the computing device, to minimize the expected time of a forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, cycle, islice, product

from torch import nn

from accel_nb.bigmodel.host_memory import align_up
from accel_nb.bigmodel.planning.cost_model import ForwardTime, Pace, forward_time
from accel_nb.bigmodel.planning.module_tree import ModuleTree
from accel_nb.bigmodel.planning.sizes import Device

NUM_BUFFERS = 2
"""Buffers for offloaded weights, each of the largest part's size: one is computed with while the next is read."""
_MOST_FORECASTS, _MOST_CHANGES = 1000, 30_000
"""Limits on the time of planning: about half a second for a hundred parts."""
_LESS = 1e-9
"""Minimum relative improvement, so that equal arrangements are not exchanged for each other."""
_READING_WEIGHT = 1e-3
"""Weight of the read time in comparisons: of two equally long forwards, the one that reads less is better."""


@dataclass(frozen=True)
class ForwardStep:
    """One use of a part in a forward: the bytes to read if it is offloaded, and its compute time."""

    nbytes: int
    seconds: float


@dataclass(frozen=True)
class PlacedParts:
    """Parts of a model that are placed together: one block or module, or several that share tensors."""

    names: tuple[str, ...]
    steps: tuple[int, ...]
    """Its positions in the order of a forward."""
    nbytes: int
    resident_bytes: int = 0
    """Bytes of it (buffers) that stay on the computing device when the rest is offloaded."""


class Arrangement:
    """The parts that one device computes, the steps of a forward, and the free bytes of each place.

    The first key of ``room`` is that device. Steps without a part are computed by other devices. Methods take
    ``places`` with one entry for each part.
    """

    def __init__(
        self, parts: Sequence[PlacedParts], steps: Sequence[ForwardStep], room: Mapping[Device, float], pace: Pace
    ) -> None:
        self.parts = parts
        self._steps = steps
        self._room = room
        self._main = next(iter(room))
        self._pace = pace
        self._largest = [max((steps[at].nbytes for at in part.steps), default=0) for part in parts]
        self._from_largest = sorted(range(len(parts)), key=lambda at: -self._largest[at])

    def fits(self, places: Sequence[Device]) -> bool:
        """Return whether every place has memory for its parts, and the computing device for buffers too."""
        used = dict.fromkeys(self._room, 0)
        for part, place in zip(self.parts, places, strict=True):
            used[place] += part.nbytes
            if place != self._main:
                used[self._main] += part.resident_bytes
        used[self._main] += self._buffers(places)
        return all(nbytes <= self._room[place] for place, nbytes in used.items())

    def time(self, places: Sequence[Device]) -> ForwardTime:
        """Return the expected time of a forward."""
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
            overlaps=self._pace.reads_beside,
        )

    def initial_placements(self) -> Iterator[list[Device]]:
        """Yield initial places that fit: for each size, larger parts stay on the device, then others that fit."""
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

    def improve(self, places: Sequence[Device]) -> list[Device]:
        """Return places found by local search: changes of up to three parts that fit and shorten the forward."""
        best, now = list(places), self.time(places)
        computing = sum(step.seconds for step in self._steps)
        reads = [{place: self._reading(at, place) for place in self._room} for at in range(len(best))]
        changes = list(islice(self._changes(), _MOST_CHANGES))
        num_left, num_without_gain = _MOST_FORECASTS, 0
        for change in islice(cycle(changes), 3 * _MOST_CHANGES):
            if num_without_gain == len(changes) or not num_left:
                break
            num_without_gain += 1
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
                    best, now, num_without_gain = other, found, 0
        return best

    def _changes(self) -> Iterator[Sequence[tuple[int, Device]]]:
        """Yield all changes of the places of one, two and three parts."""
        for count in (1, 2, 3):
            for chosen in combinations(range(len(self.parts)), count):
                for places in product(self._room, repeat=count):
                    yield tuple(zip(chosen, places, strict=True))

    def _reading(self, at: int, place: Device) -> float:
        if place == self._main:
            return 0.0
        return sum(self._steps[step].nbytes for step in self.parts[at].steps) / self._pace.bytes_per_s(place)

    def _buffers(self, places: Sequence[Device]) -> int:
        """Return the bytes of buffers for offloaded weights."""
        away = (at for at in self._from_largest if places[at] != self._main)
        largest = next(away, None)
        if largest is None:
            return 0
        is_alone = len(self.parts[largest].steps) == 1 and next(away, None) is None
        return (1 if is_alone else NUM_BUFFERS) * self._largest[largest]


def is_better(one: ForwardTime, other: ForwardTime) -> bool:
    """Return whether the forward of one arrangement is better than that of another."""
    cost = other.seconds + _READING_WEIGHT * other.reading
    return one.seconds + _READING_WEIGHT * one.reading < cost * (1 - _LESS)


def build_arrangement(
    tree: ModuleTree,
    places: Mapping[str, Device],
    room: Mapping[Device, float],
    pace: Pace,
    flops: Mapping[str, int],
    *,
    offload_buffers: bool,
) -> Arrangement:
    """Return the `Arrangement` of a model; ``places`` are those of the smallest parts of the tree.

    ``flops`` are those of modules, by name; the time of a part without an entry is one pass over its weights.
    """
    order = tree.leaf_parts("")
    steps: list[ForwardStep] = []
    for name in order:
        held = [tree.tensors[index] for index in tree.tensor_indices(name)]
        nbytes = sum(align_up(one.nbytes) for one in held if offload_buffers or not one.is_buffer)
        # An embedding reads few rows of its table.
        touched = 0 if isinstance(tree.modules.get(name), nn.Embedding) else nbytes
        steps.append(ForwardStep(nbytes, pace.seconds(flops.get(name, 0), touched)))
    parts: list[PlacedParts] = []
    known: set[str] = set()
    for name in order:
        if name in known or places[name] not in room:
            continue
        family = {name, *(other for other in tree.parts_sharing_tensors(name) if other in places)}
        known |= family
        inside = [tree.tensors[index] for index in set().union(*(tree.tensor_indices(other) for other in family))]
        staying = sum(held.nbytes for held in inside if held.is_buffer and not offload_buffers)
        nbytes = sum(align_up(held.nbytes) for held in inside)
        own = tuple(at for at, other in enumerate(order) if other in family)
        parts.append(PlacedParts(tuple(sorted(family, key=lambda other: (other != name, other))), own, nbytes, staying))
    return Arrangement(parts, steps, room, pace)
