"""Rows of numbers kept by column, thinned beyond a limit so that extremes stay; plain data."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_ROWS = 1_000_000
"""Above this many rows the older ones are thinned to about half."""

KEPT_RAW = 4096
"""The newest rows, which thinning leaves whole: a reader that keeps up never notices it."""

THINNED_BLOCK = 4


class Table:
    """Columns of equal length; the first is x and must not decrease, ``key`` is the one whose extremes survive."""

    def __init__(self, num_columns: int, *, key: int = 1, max_rows: int = MAX_ROWS) -> None:
        self.columns = [array("d") for _ in range(num_columns)]
        self.total = 0
        self._key = key
        self._max_rows = max_rows
        self._thinned_below = 0

    def __len__(self) -> int:
        return len(self.columns[0])

    def append(self, row: Sequence[float]) -> None:
        """Add one row of as many numbers as there are columns."""
        for column, value in zip(self.columns, row, strict=True):
            column.append(value)
        self.total += 1
        if len(self.columns[0]) > self._max_rows:
            self._thin()

    def rows_since(self, total: int) -> list[array[float]] | None:
        """Return the columns of the rows after the first ``total``, or None when some of them are thinned away."""
        if total < self._thinned_below:
            return None
        start = len(self) - (self.total - total)
        return [column[start:] for column in self.columns]

    def picked(self, max_rows: int) -> NDArray[np.float64]:
        """Return at most about ``max_rows`` rows, shape [columns, rows]: lowest and highest of each block of rows."""
        import numpy as np

        values = np.array([np.frombuffer(column, dtype=np.float64) for column in self.columns])
        if len(self) <= max_rows:
            return values
        block = 2
        while -(-len(self) // block) * 2 > max_rows:
            block *= 2
        return values[:, extreme_rows(values[self._key], block)]

    def _thin(self) -> None:
        import numpy as np

        end = max(0, len(self) - KEPT_RAW)
        rows = extreme_rows(np.array(self.columns[self._key])[:end], THINNED_BLOCK)
        for index, column in enumerate(self.columns):
            self.columns[index] = array("d", np.array(column)[rows].tobytes()) + column[end:]
        self._thinned_below = self.total - KEPT_RAW


def extreme_rows(values: NDArray[np.float64], block: int) -> NDArray[np.intp]:
    """Return the rows of the lowest and highest number of each block, in order; what is not finite loses."""
    import numpy as np

    padding = -len(values) % block
    finite = np.isfinite(values)
    low = np.pad(np.where(finite, values, np.inf), (0, padding), constant_values=np.inf)
    high = np.pad(np.where(finite, values, -np.inf), (0, padding), constant_values=-np.inf)
    starts = np.arange(0, len(low), block)
    return np.unique(
        np.concatenate([low.reshape(-1, block).argmin(1) + starts, high.reshape(-1, block).argmax(1) + starts])
    )
