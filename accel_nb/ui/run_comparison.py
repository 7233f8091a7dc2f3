"""The runs of a kernel that have ended, thinned: what a later panel draws beside its own curves."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from accel_nb.ui.messages import TableKind
from accel_nb.ui.view import Block, PanelState

MAX_RUNS = 5
"""So many beside the one that is looked at."""
MAX_POINTS = 2000
"""Rows that are kept of each curve: two for each pixel of a wide chart."""


@dataclass(frozen=True, slots=True)
class EarlierRun:
    """One run that has ended: of every curve its mean over the ranks, float64 arrays of shape [columns, rows]."""

    number: int
    title: str
    summary: str
    num_workers: int
    curves: dict[tuple[TableKind, str], Any]

    def blocks(self, table: TableKind, name: str) -> list[Block]:
        """Return a curve as a message carries it; nothing for one that the run has not."""
        columns = self.curves.get((table, name))
        return [] if columns is None else [Block(table, 0, name, list(columns))]


class EarlierRuns:
    """The last runs of one kernel; any thread may ask."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._runs: deque[EarlierRun] = deque(maxlen=MAX_RUNS + 1)

    def begin(self) -> int:
        """Return the number of a run that begins."""
        return next(self._numbers)

    def keep(self, number: int, state: PanelState) -> None:
        """Keep what a run has drawn, now that it has ended; one that has drawn nothing is none."""
        curves: dict[tuple[TableKind, str], Any] = {}
        wanted: list[tuple[TableKind, str]] = [("step", ""), *(("metric", name) for name in state.metrics)]
        for kind, name in wanted:
            if (table := state.mean(kind, name)) is not None:
                curves[kind, name] = table.picked(MAX_POINTS)
        if curves:
            self._runs.append(EarlierRun(number, state.title, state.summary(), state.num_workers, curves))

    def others(self, number: int) -> Sequence[EarlierRun]:
        """Return the runs beside that of this number, the newest first."""
        return [run for run in reversed(tuple(self._runs)) if run.number != number][:MAX_RUNS]
