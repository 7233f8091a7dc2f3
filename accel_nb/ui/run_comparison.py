"""Ended runs of a kernel, downsampled, to be drawn in the charts of a later panel."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from accel_nb.ui.messages import TableKind
from accel_nb.ui.panel_tables import Block
from accel_nb.ui.view import PanelState

MAX_RUNS = 5
"""Maximum number of runs to compare a run with."""
MAX_POINTS = 2000
"""Maximum number of rows kept of each curve: two for each pixel of a wide chart."""

MAX_KEPT_RUNS = 100
"""Maximum number of ended runs that are kept with all rows."""
MAX_KEPT_BYTES = 256_000_000
"""Limit of their size."""


@dataclass(frozen=True, slots=True)
class EarlierRun:
    """One ended run: the mean over ranks of every curve, as float64 arrays of shape [columns, rows]."""

    number: int
    title: str
    summary: str
    num_workers: int
    curves: dict[tuple[TableKind, str], Any]

    def blocks(self, table: TableKind, name: str) -> list[Block]:
        """Return a curve as blocks of a message; empty if the run has no such curve.

        The curve of steps without a name is that of the run's first loss, for axes of samples and of time.
        """
        columns = self.curves.get((table, name))
        if columns is None and (table, name) == ("step", ""):
            columns = next((found for (kind, _), found in self.curves.items() if kind == "step"), None)
        return [] if columns is None else [Block(table, 0, name, list(columns))]


class EarlierRuns:
    """The last runs of one kernel; thread-safe."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._runs: deque[EarlierRun] = deque(maxlen=MAX_RUNS + 1)
        # Ended runs with all their rows, for answers to their panels' queries.
        self._states: deque[PanelState] = deque(maxlen=MAX_KEPT_RUNS)

    def begin(self) -> int:
        """Return the number of a new run."""
        return next(self._numbers)

    def keep(self, number: int, state: PanelState) -> None:
        """Store the curves of an ended run, if it has any."""
        curves: dict[tuple[TableKind, str], Any] = {}
        names: list[tuple[TableKind, str]] = [
            *(("step", name) for name in state.loss_names),
            *(("metric", name) for name in state.metrics),
        ]
        for kind, name in names:
            if (table := state.tables.mean(kind, name)) is not None:
                curves[kind, name] = table.downsampled(MAX_POINTS)
        self._states.append(state)
        while len(self._states) > 1 and sum(state.tables.num_bytes for state in self._states) > MAX_KEPT_BYTES:
            self._states.popleft()
        if curves:
            self._runs.append(EarlierRun(number, state.title, state.summary(), state.num_workers, curves))

    def others(self, number: int) -> Sequence[EarlierRun]:
        """Return the runs other than ``number``, newest first."""
        return [run for run in reversed(tuple(self._runs)) if run.number != number][:MAX_RUNS]
