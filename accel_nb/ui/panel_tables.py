"""The tables of one panel: rows of every rank, their mean over ranks, and the rows that a page has to receive."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accel_nb.ui.messages import BlockHeader, TableKind
from accel_nb.ui.series_table import MAX_ROWS, RowLimit, Table

Key = tuple[TableKind, int, str]
Cursor = dict[Key, int]
"""The number of rows of each table that a reader has received."""

MEAN_RANK = -1
"""The rank number that stands for the mean over all ranks."""

STEP_COLUMNS = ("step", "loss", "learning rate", "step time", "samples", "time")
"""``samples`` counts the rank's samples so far; ``time`` is in seconds since the run's first event."""
METRIC_COLUMNS = ("step", "value")
MEMORY_COLUMNS = ("time", "parameters", "gradients", "optimizer", "other", "cached", "free", "total")

PLAN_COLUMNS = ("step", "learning rate")
"""Learning rates of a schedule's future steps; each plan is a separate table, named by a number."""

TABLE_COLUMNS: Mapping[TableKind, tuple[str, ...]] = {
    "step": STEP_COLUMNS,
    "metric": METRIC_COLUMNS,
    "memory": MEMORY_COLUMNS,
    "plan": PLAN_COLUMNS,
}
"""The columns of each table; the first is x, the last of ``memory`` is the total."""

MAX_BYTES: Mapping[TableKind, int] = {
    "step": 512_000_000,
    "metric": 128_000_000,
    "memory": 8_000_000,
    "plan": 1_000_000,
}
"""Limit of the size of all tables of a kind together, over all ranks and metrics; beyond it older rows are thinned."""
MAX_SNAPSHOT_ROWS = 40_000
WAITING_ROWS = 4096
"""The number of rows that the mean waits for a rank: as many as a ring holds, since rings are read one by one."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of one table; ``columns`` are arrays of float64, Python's or numpy's."""

    table: TableKind
    rank: int
    name: str
    columns: Sequence[Any]


class RankMean:
    """Mean over ranks, row by row; a rank that reports nothing delays it by at most `WAITING_ROWS` rows."""

    def __init__(self, table: Table, num_ranks: int) -> None:
        self.table = table
        self._num_ranks = num_ranks
        self._reporting_ranks: set[int] = set()
        self._incomplete_rows: dict[float, list[tuple[float, Sequence[float]]]] = {}
        self._last_x = -math.inf

    def add(self, rank: int, x: float, weight: float, values: Sequence[float]) -> None:
        """Add one rank's values at ``x`` with a weight."""
        if x <= self._last_x:
            return
        self._reporting_ranks.add(rank)
        self._num_ranks = max(self._num_ranks, len(self._reporting_ranks))
        rows = self._incomplete_rows.setdefault(x, [])
        rows.append((weight, values))
        if len(rows) >= self._num_ranks:
            self._flush(x)
        elif len(self._incomplete_rows) > WAITING_ROWS:
            self._num_ranks = max(1, len(self._reporting_ranks))
            self._flush(min(self._incomplete_rows))

    def finish(self) -> None:
        """Append the rows for which values of some ranks are missing, as the mean over the other ranks."""
        if self._incomplete_rows:
            self._flush(max(self._incomplete_rows))

    def _flush(self, last_x: float) -> None:
        for x in sorted(x for x in self._incomplete_rows if x <= last_x):
            self.table.append((x, *_weighted_mean(self._incomplete_rows.pop(x))))
        self._last_x = last_x


class PanelTables(Mapping[Key, Table]):
    """Tables by their kind, rank and name. A table exists from its first row on."""

    def __init__(self, num_ranks: int, max_rows: int = MAX_ROWS) -> None:
        self._num_ranks = num_ranks
        self._tables: dict[Key, Table] = {}
        self._means: dict[tuple[TableKind, str], RankMean] = {}
        self._row_limits = {kind: RowLimit(max_bytes, max_rows) for kind, max_bytes in MAX_BYTES.items()}

    def __getitem__(self, key: Key) -> Table:
        return self._tables[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    @property
    def num_rows(self) -> int:
        """The number of rows of the largest table."""
        return max(map(len, self._tables.values()), default=0)

    @property
    def num_bytes(self) -> int:
        """The size of all rows, in bytes."""
        return 8 * sum(len(table) * len(table.columns) for table in self._tables.values())

    def table(self, kind: TableKind, rank: int, name: str) -> Table:
        """Return the table of a rank, new if there is none."""
        table = self._tables.get((kind, rank, name))
        if table is None:
            num_columns = len(TABLE_COLUMNS[kind])
            key = num_columns - 1 if kind == "memory" else 1
            table = self._tables[kind, rank, name] = Table(num_columns, key=key, row_limit=self._row_limits[kind])
        return table

    def append(self, kind: TableKind, rank: int, name: str, row: Sequence[float], *, weight: float) -> None:
        """Append a row to the table of a rank, and add it with a weight to the mean over ranks."""
        self.table(kind, rank, name).append(row)
        if self._num_ranks > 1:
            mean = self._means.get((kind, name))
            if mean is None:
                mean = self._means[kind, name] = RankMean(self.table(kind, MEAN_RANK, name), self._num_ranks)
            mean.add(rank, row[0], weight, row[1:])

    def finish_means(self) -> None:
        """Complete the means with the rows that some ranks have not sent; no more rows follow."""
        for mean in self._means.values():
            mean.finish()

    def mean(self, kind: TableKind, name: str) -> Table | None:
        """Return the table of the mean over ranks, or of the only rank; None before the first row."""
        mean = self._tables.get((kind, MEAN_RANK, name))
        if mean is not None and len(mean):
            return mean
        return next((table for (k, _, n), table in self._tables.items() if (k, n) == (kind, name) and len(table)), None)

    def of_rank(self, kind: TableKind, rank: int) -> list[Table]:
        """Return all tables of a kind that a rank has."""
        return [table for (k, r, _), table in self._tables.items() if (k, r) == (kind, rank)]

    def rows_since(self, cursor: Cursor, max_bytes: int | None = None) -> tuple[list[Block], Cursor] | None:
        """Return the rows after a reader's cursor and its new cursor.

        Returns None if some of the rows were thinned: the reader needs a snapshot. If the rows are larger than
        ``max_bytes``, they are downsampled to the minima and maxima of each table, at least two rows.
        """
        totals = self._totals()
        behind = {key: cursor.get(key, 0) for key, total in totals.items() if cursor.get(key, 0) != total}
        row_bytes = 8 * sum(len(self._tables[key].columns) for key in behind)
        limits = {} if max_bytes is None or not behind else {"max_rows": max(2, max_bytes // row_bytes)}
        blocks: list[Block] = []
        for key, num_received in behind.items():
            # A plan is sent once, with all its rows.
            columns = self._tables[key].rows_since(num_received, **({} if key[0] == "plan" else limits))
            if columns is None:
                return None
            blocks.append(Block(*key, columns))
        return blocks, totals

    def rows_between(
        self, kind: TableKind, name: str, first: float, last: float, max_points: int = 4000
    ) -> list[Block]:
        """Return the rows of a curve with x in ``[first, last]``, for every rank, about ``max_points`` each."""
        return [
            Block(*key, list(columns))
            for key, table in self._tables.items()
            if (key[0], key[2]) == (kind, name)
            and (columns := table.downsampled_between(first, last, max_points)).shape[1]
        ]

    def snapshot(self, max_points: int = 2000) -> tuple[list[Block], Cursor]:
        """Return all tables, downsampled to at most about ``max_points`` rows each, and the cursor after them."""
        limit = max(64, min(max_points, MAX_SNAPSHOT_ROWS // max(1, len(self._tables))))
        blocks = [
            Block(*key, list(table.downsampled(limit // 4 if key[0] == "memory" else limit)))
            for key, table in self._tables.items()
            if len(table)
        ]
        return blocks, self._totals()

    def _totals(self) -> Cursor:
        return {key: table.total for key, table in self._tables.items()}


def pack_blocks(blocks: Sequence[Block]) -> tuple[list[BlockHeader], bytes]:
    """Return the blocks' headers and one float64 buffer, which stores the blocks in order, each column by column."""
    headers: list[BlockHeader] = [
        {"table": block.table, "rank": block.rank, "name": block.name, "rows": len(block.columns[0])}
        for block in blocks
    ]
    return headers, b"".join(column.tobytes() for block in blocks for column in block.columns)


def _weighted_mean(rows: Sequence[tuple[float, Sequence[float]]]) -> list[float]:
    total = sum(weight for weight, _ in rows)
    weights = [weight / total for weight, _ in rows] if total > 0 else [1 / len(rows)] * len(rows)
    return [
        sum(weight * values[index] for weight, (_, values) in zip(weights, rows, strict=True))
        for index in range(len(rows[0][1]))
    ]
