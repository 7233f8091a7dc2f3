"""Events of a run at positions of the step axis: a bounded list without repeats."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, overload

from accel_nb.ui.message_values import cap_text

MAX_MARKS = 200
MAX_CHECKPOINT_MARKS = 64
"""At this number every second checkpoint mark is dropped, so that marks of failures still fit into `MAX_MARKS`."""

MarkKind = Literal["nan", "skipped", "restart", "failed", "interrupted", "checkpoint", "control", "begins"]


@dataclass(frozen=True, slots=True)
class Mark:
    """An event at a position on the step axis."""

    x: float
    kind: MarkKind
    rank: int
    text: str


class Marks(Sequence[Mark]):
    """The marks of a run, in the order in which they arrived."""

    def __init__(self) -> None:
        self._marks: list[Mark] = []

    def __len__(self) -> int:
        return len(self._marks)

    def __iter__(self) -> Iterator[Mark]:
        return iter(self._marks)

    @overload
    def __getitem__(self, index: int) -> Mark: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Mark]: ...
    def __getitem__(self, index: int | slice) -> Mark | Sequence[Mark]:
        return self._marks[index]

    def add(self, x: float, kind: MarkKind, rank: int, text: str = "") -> None:
        """Add a mark, unless there is one of this kind at this x, as from another rank."""
        if kind == "checkpoint":
            self._thin_checkpoints()
        if any(mark.x == x and mark.kind == kind for mark in self._marks[-8:]):
            return
        if len(self._marks) < MAX_MARKS and math.isfinite(x):
            self._marks.append(Mark(x, kind, rank, cap_text(text)))

    def _thin_checkpoints(self) -> None:
        earlier = [mark for mark in self._marks if mark.kind == "checkpoint"]
        if len(earlier) >= MAX_CHECKPOINT_MARKS:
            dropped = set(map(id, earlier[1::2]))
            self._marks = [mark for mark in self._marks if id(mark) not in dropped]
