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
_MAX_FORECASTS, _MAX_CHANGES = 1000, 30_000
"""Limits on the time of planning: about half a second for a hundred parts."""
_MIN_IMPROVEMENT = 1e-9
"""Minimum relative improvement of the time, so that equally good placements are not exchanged for each other."""
_READ_TIME_WEIGHT = 1e-3
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
    """Their positions in the order of a forward."""
    nbytes: int
    resident_bytes: int = 0
    """Bytes of them (buffers) that stay on the computing device when the rest is offloaded."""


class Arrangement:
    """The parts that one device computes, the steps of a forward, and the free bytes of each place.

    The first key of ``room`` is that device; the other keys are the places of offloaded parts. Steps without a part
    are computed by other devices. Methods take ``places``, one for each part.
    """

    def __init__(
        self, parts: Sequence[PlacedParts], steps: Sequence[ForwardStep], room: Mapping[Device, float], pace: Pace
    ) -> None:
        self.parts = parts
        self._steps = steps
        self._room = room
        self._main = next(iter(room))
        self._pace = pace
        self._largest = [max((steps[index].nbytes for index in part.steps), default=0) for part in parts]
        self._from_largest = sorted(range(len(parts)), key=lambda index: -self._largest[index])

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
                for index in part.steps:
                    reading[index] = self._steps[index].nbytes / self._pace.bytes_per_s(place)
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
            for index in self._from_largest:
                for place in faster if places[index] == slowest else ():
                    before, places[index] = places[index], place
                    if self.fits(places):
                        break
                    places[index] = before
            yield places

    def improve(self, places: Sequence[Device]) -> list[Device]:
        """Return places found by local search: changes of up to three parts that fit and shorten the forward."""
        best, best_time = list(places), self.time(places)
        computing = sum(step.seconds for step in self._steps)
        reads = [{place: self._reading(index, place) for place in self._room} for index in range(len(best))]
        changes = list(islice(self._changes(), _MAX_CHANGES))
        num_left, num_without_gain = _MAX_FORECASTS, 0
        for change in islice(cycle(changes), 3 * _MAX_CHANGES):
            if num_without_gain == len(changes) or not num_left:
                break
            num_without_gain += 1
            reading = best_time.read_s
            for index, place in change:
                reading += reads[index][place] - reads[index][best[index]]
            lower_bound = max(computing, reading) if self._pace.reads_beside else computing + reading
            if not is_better(ForwardTime(lower_bound, reading, computing), best_time):
                continue
            other = list(best)
            for index, place in change:
                other[index] = place
            if self.fits(other):
                num_left -= 1
                if is_better(found := self.time(other), best_time):
                    best, best_time, num_without_gain = other, found, 0
        return best

    def _changes(self) -> Iterator[Sequence[tuple[int, Device]]]:
        """Yield all changes of the places of one, two and three parts."""
        for count in (1, 2, 3):
            for chosen in combinations(range(len(self.parts)), count):
                for places in product(self._room, repeat=count):
                    yield tuple(zip(chosen, places, strict=True))

    def _reading(self, index: int, place: Device) -> float:
        if place == self._main:
            return 0.0
        return sum(self._steps[step].nbytes for step in self.parts[index].steps) / self._pace.bytes_per_s(place)

    def _buffers(self, places: Sequence[Device]) -> int:
        """Return the bytes of buffers for offloaded weights."""
        offloaded = (index for index in self._from_largest if places[index] != self._main)
        largest = next(offloaded, None)
        if largest is None:
            return 0
        is_alone = len(self.parts[largest].steps) == 1 and next(offloaded, None) is None
        return (1 if is_alone else NUM_BUFFERS) * self._largest[largest]


def is_better(first: ForwardTime, second: ForwardTime) -> bool:
    """Return whether one forward time is better than another."""
    cost = second.seconds + _READ_TIME_WEIGHT * second.read_s
    return first.seconds + _READ_TIME_WEIGHT * first.read_s < cost * (1 - _MIN_IMPROVEMENT)


def build_arrangement(
    tree: ModuleTree,
    places: Mapping[str, Device],
    room: Mapping[Device, float],
    pace: Pace,
    flops: Mapping[str, int],
    *,
    offload_buffers: bool,
) -> Arrangement:
    """Return the `Arrangement` of a model, from the place of each part that cannot be split further.

    ``flops`` are the operations of modules, by name; a part without an entry takes the time of one pass over its
    weights.
    """
    order = tree.leaf_parts("")
    steps: list[ForwardStep] = []
    for name in order:
        tensors_of_part = [tree.tensors[index] for index in tree.tensor_indices(name)]
        nbytes = sum(align_up(tensor.nbytes) for tensor in tensors_of_part if offload_buffers or not tensor.is_buffer)
        # An embedding reads few rows of its table.
        bytes_read = 0 if isinstance(tree.modules.get(name), nn.Embedding) else nbytes
        steps.append(ForwardStep(nbytes, pace.seconds(flops.get(name, 0), bytes_read)))
    parts: list[PlacedParts] = []
    known: set[str] = set()
    for name in order:
        if name in known or places[name] not in room:
            continue
        parts_together = {name, *(other for other in tree.parts_sharing_tensors(name) if other in places)}
        known |= parts_together
        group_tensors = [
            tree.tensors[index] for index in set().union(*(tree.tensor_indices(other) for other in parts_together))
        ]
        resident_bytes = sum(tensor.nbytes for tensor in group_tensors if tensor.is_buffer and not offload_buffers)
        nbytes = sum(align_up(tensor.nbytes) for tensor in group_tensors)
        positions = tuple(index for index, other in enumerate(order) if other in parts_together)
        parts.append(
            PlacedParts(
                tuple(sorted(parts_together, key=lambda other: (other != name, other))),
                positions,
                nbytes,
                resident_bytes,
            )
        )
    return Arrangement(parts, steps, room, pace)
