"""Comparison of the values that a divided call reads from tensors with those of other ranks and of earlier calls."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

from accel_nb.accelerator.model_division.row_layout import RowLayout
from accel_nb.accelerator.model_division.value_reads import ANY_VALUE

MAX_ACCEPTED = 8
"""After this many different values without an effect, a value that the model's code reads counts as having none.

After half as many if they differed among ranks.
"""


class ResultMayDiffer(BaseException):
    """Raised on all ranks if a call cannot be divided, or has read a value with which it was not checked.

    ``read`` is the index of this value among those that the call reads. A model's ``except Exception`` does not catch
    it.
    """

    def __init__(self, read: int | None = None) -> None:
        super().__init__(read)
        self.read = read


class ReadComparison:
    """A callback that raises `ResultMayDiffer` if a read value differs among ranks, or is not an accepted one."""

    def __init__(self, gather_codes_at: Callable[[int, int], list[int]], layout: RowLayout) -> None:
        self._gather_codes_at = gather_codes_at
        self._reads = enumerate(layout.reads)

    def __call__(self, value: Any) -> None:
        """Compare the next value that is read with those of all ranks."""
        number, accepted = next(self._reads, (0, ANY_VALUE))
        if not isinstance(accepted, tuple):
            return
        codes = self._gather_codes_at(number, code_of(value))
        if len(set(codes)) > 1:
            if accepted.count(ANY_VALUE) < MAX_ACCEPTED // 2:
                raise ResultMayDiffer(number)
        elif codes[0] not in map(code_of, accepted):
            raise ResultMayDiffer(number)


class RecordedReads:
    """Records the values that a call reads from tensors."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def __call__(self, value: Any) -> None:
        """Record a value."""
        self.values.append(value)

    def has_new(self, layout: RowLayout) -> bool:
        """Return whether a value is not among the accepted ones."""
        return any(
            isinstance(accepted, tuple) and code_of(value) not in map(code_of, accepted)
            for accepted, value in zip(layout.reads, self.values, strict=False)
        )


def code_of(value: Any) -> int:
    """Return a checksum of a value's text, for comparison among ranks."""
    return zlib.crc32(repr(value).encode())
