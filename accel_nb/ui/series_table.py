"""Tables of numbers, stored by column and downsampled beyond a limit; minima and maxima are kept."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_ROWS = 1_000_000
"""In a table with more rows the older ones are thinned to about half."""

KEPT_RAW = 4096
"""The number of newest rows that are not thinned, so that a reader that polls often gets every row."""

THINNED_BLOCK = 4
"""The number of successive rows of which thinning keeps the lowest and the highest."""


@dataclass(slots=True)
class RowLimit:
    """Limit of rows for each of several tables that share ``max_bytes``."""

    max_bytes: int = 1 << 62
    max_rows: int = MAX_ROWS
    num_columns: int = 0

    def add_columns(self, num_columns: int) -> None:
        """Lower the limit for another table with ``num_columns`` columns."""
        self.num_columns += num_columns
        self.max_rows = min(self.max_rows, self.max_bytes // (8 * self.num_columns))


class Table:
    """Columns of equal length; the first is x and must not decrease.

    Beyond ``row_limit`` the older rows are thinned; minima and maxima of column ``key`` are kept.
    """

    def __init__(self, num_columns: int, *, key: int = 1, row_limit: RowLimit | None = None) -> None:
        self.columns = [array("d") for _ in range(num_columns)]
        self.total = 0
        self._key = key
        self._row_limit = row_limit or RowLimit()
        self._row_limit.add_columns(num_columns)
        self._thinned_below = 0

    def __len__(self) -> int:
        return len(self.columns[0])

    def append(self, row: Sequence[float]) -> None:
        """Add one row of as many numbers as there are columns."""
        for column, value in zip(self.columns, row, strict=True):
            column.append(value)
        self.total += 1
        if len(self.columns[0]) > self._row_limit.max_rows:
            self._thin()

    def rows_since(self, total: int, max_rows: int = MAX_ROWS) -> Sequence[Sequence[float]] | None:
        """Return the columns of the rows after the first ``total``; None if some of them have been thinned.

        Of more than ``max_rows`` rows the minima and maxima of blocks are returned, as by `downsampled`.
        """
        if total < self._thinned_below:
            return None
        start = len(self) - (self.total - total)
        if self.total - total <= max_rows:
            return [column[start:] for column in self.columns]
        return list(self._downsampled(slice(start, None), max_rows))

    def downsampled(self, max_rows: int) -> NDArray[np.float64]:
        """Return at most about ``max_rows`` rows, shape [columns, rows].

        These are the lowest and highest of each block of rows, and the last row, whose values are displayed.
        """
        return self._downsampled(slice(None), max_rows)

    def bands(self, max_blocks: int) -> NDArray[np.float64]:
        """Return x, lowest, highest and mean key value of each block of rows, shape [4, blocks].

        Numbers that are not finite are left out; a block without finite numbers is NaN.
        """
        import numpy as np

        xs, ys = (np.frombuffer(self.columns[index], dtype=np.float64) for index in (0, self._key))
        block = 1
        while -(-len(xs) // block) > max(1, max_blocks):
            block *= 2
        starts = np.arange(0, len(xs), block)
        finite = np.isfinite(ys)
        counts = np.add.reduceat(finite, starts, dtype=np.float64)
        counts[counts == 0] = np.nan
        is_empty = np.isnan(counts)
        low = np.where(is_empty, np.nan, np.minimum.reduceat(np.where(finite, ys, np.inf), starts))
        high = np.where(is_empty, np.nan, np.maximum.reduceat(np.where(finite, ys, -np.inf), starts))
        with np.errstate(over="ignore"):  # the sum of huge numbers
            mean = np.add.reduceat(np.where(finite, ys, 0.0), starts) / counts
        last = np.minimum(starts + block, len(xs)) - 1
        return np.array([(xs[starts] + xs[last]) / 2, low, high, np.clip(mean, low, high)])

    def downsampled_between(self, first: float, last: float, max_rows: int) -> NDArray[np.float64]:
        """Return at most about ``max_rows`` of the rows with x in ``[first, last]``, selected as by ``downsampled``."""
        xs = self.columns[0]
        return self._downsampled(slice(bisect_left(xs, first), bisect_right(xs, last)), max_rows)

    def _downsampled(self, rows: slice, max_rows: int) -> NDArray[np.float64]:
        import numpy as np

        columns = [np.frombuffer(column, dtype=np.float64)[rows] for column in self.columns]
        num_rows = len(columns[0])
        if num_rows <= max_rows:
            return np.array(columns)
        block = 2
        while -(-num_rows // block) * 2 > max(2, max_rows):
            block *= 2
        indices = extreme_rows(columns[self._key], block)
        if indices[-1] != num_rows - 1:
            indices = np.append(indices, num_rows - 1)
        return np.array([column[indices] for column in columns])

    def _thin(self) -> None:
        import numpy as np

        num_kept = min(KEPT_RAW, self._row_limit.max_rows // 4)
        end = max(0, len(self) - num_kept)
        rows = extreme_rows(np.array(self.columns[self._key])[:end], THINNED_BLOCK)
        for index, column in enumerate(self.columns):
            self.columns[index] = array("d", np.array(column)[rows].tobytes()) + column[end:]
        self._thinned_below = self.total - num_kept


def extreme_rows(values: NDArray[np.float64], block: int) -> NDArray[np.intp]:
    """Return the row indices of the lowest and highest number of each block, in order.

    NaN and infinities are selected only where a block has no finite number.
    """
    import numpy as np

    padding = -len(values) % block
    finite = np.isfinite(values)
    low = np.pad(np.where(finite, values, np.inf), (0, padding), constant_values=np.inf)
    high = np.pad(np.where(finite, values, -np.inf), (0, padding), constant_values=-np.inf)
    starts = np.arange(0, len(low), block)
    return np.unique(
        np.concatenate([low.reshape(-1, block).argmin(1) + starts, high.reshape(-1, block).argmax(1) + starts])
    )
