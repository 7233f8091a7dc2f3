"""Queries that a browser may send to a panel: records that are checked on receipt and compute their answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from accel_nb.ui.csv_export import save_csv, to_csv
from accel_nb.ui.messages import CurveKind, EarlierRunFacts
from accel_nb.ui.panel_tables import Block
from accel_nb.ui.run_comparison import EarlierRun
from accel_nb.ui.view import PanelState

MAX_CSV_VALUES = 100_000
"""A CSV of more values is written to a file, because Jupyter servers limit the rate of a kernel's messages."""


@dataclass(frozen=True, slots=True)
class QuerySources:
    """Data for answers: the state of the panel's run, None if it is no longer in memory, and the earlier runs."""

    state: PanelState | None
    earlier_runs: Sequence[EarlierRun] = ()
    save_html: Callable[[PanelState], str | None] = lambda state: None
    """Writes the run as one HTML file and returns its name."""


@dataclass(frozen=True, slots=True)
class DetailQuery:
    """Request the rows of a curve's steps from ``first`` to ``last``."""

    kind: ClassVar[str] = "detail"
    table: CurveKind
    name: str
    first: float
    last: float

    @classmethod
    def parse(cls, content: Mapping[str, Any]) -> DetailQuery | None:
        """Return the query in a browser's message; None if a field is missing or of another type."""
        table, name = content.get("table"), content.get("name")
        first, last = _axis_position(content.get("first")), _axis_position(content.get("last"))
        if table not in ("step", "metric") or not isinstance(name, str) or first is None or last is None:
            return None
        return cls(table, name, first, last)

    @property
    def key(self) -> object:
        """Of queued queries with equal keys only the last is answered: a chart shows one range at a time."""
        return DetailQuery, self.table, self.name

    def answer(self, sources: QuerySources) -> tuple[dict[str, Any], list[Block]]:
        """Return the answer's fields and the rows."""
        state = sources.state
        blocks = [] if state is None else state.tables.rows_between(self.table, self.name, self.first, self.last)
        where = {"table": self.table, "name": self.name, "first": self.first, "last": self.last}
        return {"kind": "detail", **where}, blocks


@dataclass(frozen=True, slots=True)
class EarlierListQuery:
    """Request the list of runs to compare with."""

    kind: ClassVar[str] = "earlier"

    @property
    def key(self) -> object:
        """All such queries are equal: one answer serves them."""
        return self

    def answer(self, sources: QuerySources) -> tuple[dict[str, Any], list[Block]]:
        """Return the numbers, titles and summaries of the runs."""
        runs: list[EarlierRunFacts] = [
            {"run": run.number, "title": run.title, "summary": run.summary} for run in sources.earlier_runs
        ]
        return {"kind": "earlier", "runs": runs}, []


@dataclass(frozen=True, slots=True)
class EarlierCurveQuery:
    """Request one curve of an earlier run."""

    kind: ClassVar[str] = "earlier"
    run: int
    table: CurveKind
    name: str

    @classmethod
    def parse(cls, content: Mapping[str, Any]) -> EarlierCurveQuery | None:
        """Return the query in a browser's message; None if a field is missing or of another type."""
        run, table, name = content.get("run"), content.get("table"), content.get("name")
        if type(run) is not int or table not in ("step", "metric") or not isinstance(name, str):
            return None
        return cls(run, table, name)

    @property
    def key(self) -> object:
        """Queries of different curves have different keys, so each is answered."""
        return self

    def answer(self, sources: QuerySources) -> tuple[dict[str, Any], list[Block]]:
        """Return the curve's rows: none if the run is no longer in memory or has no such curve."""
        run = next((run for run in sources.earlier_runs if run.number == self.run), None)
        blocks = [] if run is None else run.blocks(self.table, self.name)
        num_workers = 1 if run is None else run.num_workers
        return {"kind": "earlier curve", "run": self.run, "num_workers": num_workers}, blocks


@dataclass(frozen=True, slots=True)
class CsvQuery:
    """Request every row of the run as CSV: as text, or as a file in the notebook's folder if it is large."""

    kind: ClassVar[str] = "csv"

    @property
    def key(self) -> object:
        """All such queries are equal: one answer serves them."""
        return self

    def answer(self, sources: QuerySources) -> tuple[dict[str, Any], list[Block]]:
        """Return the text, the name of the file, or neither if the rows are no longer in memory."""
        state = sources.state
        if state is None:
            return {"kind": "csv", "text": None, "file": None}, []
        num_values = sum(len(table) * len(table.columns) for table in state.tables.values())
        if num_values > MAX_CSV_VALUES:
            return {"kind": "csv", "text": None, "file": save_csv(state)}, []
        return {"kind": "csv", "text": to_csv(state), "file": None}, []


@dataclass(frozen=True, slots=True)
class ShareQuery:
    """Request the run as one HTML file in the notebook's folder."""

    kind: ClassVar[str] = "share"

    @property
    def key(self) -> object:
        """All such queries are equal: one answer serves them."""
        return self

    def answer(self, sources: QuerySources) -> tuple[dict[str, Any], list[Block]]:
        """Return the name of the file; None if the rows are no longer in memory."""
        state = sources.state
        return {"kind": "share", "file": None if state is None else sources.save_html(state)}, []


Query = CsvQuery | ShareQuery | DetailQuery | EarlierListQuery | EarlierCurveQuery


def read_query(content: object) -> Query | None:
    """Return the query in a browser's message; None for any other message."""
    if not isinstance(content, Mapping):
        return None
    message: Mapping[str, Any] = content  # pyright: ignore[reportUnknownVariableType]
    match message.get("kind"):
        case CsvQuery.kind:
            return CsvQuery()
        case ShareQuery.kind:
            return ShareQuery()
        case DetailQuery.kind:
            return DetailQuery.parse(message)
        case EarlierListQuery.kind:
            return EarlierCurveQuery.parse(message) if "run" in message else EarlierListQuery()
        case _:
            return None


def _axis_position(value: object) -> float | None:
    """Return a number that can be a position on an axis; None for any other JSON value."""
    return float(value) if isinstance(value, int | float) and type(value) is not bool and abs(value) < 1e300 else None
