"""All rows of a panel as CSV: every step of every curve."""

from __future__ import annotations

import csv
import io
import itertools
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from accel_nb.ui.panel_tables import MEAN_RANK, STEP_COLUMNS
from accel_nb.ui.view import PanelState

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from accel_nb.ui.series_table import Table

MAX_NAME = 80


def to_csv(state: PanelState) -> str:
    """Return CSV with a row for each step: the mean over ranks and each rank's value of every loss and metric.

    Numbers are written without loss of precision. A cell is empty where a curve has no value at the step.
    """
    import numpy as np

    columns = list(_columns(state))
    steps = {id(table): np.array(table.columns[0]) for _, table, _ in columns}
    first = next(iter(steps.values()), np.zeros(0))
    is_common = _is_increasing(first) and all(np.array_equal(first, other) for other in steps.values())
    # Values that were logged several times in a step have a row each: the imaginary part of a row's key counts them.
    keys = {} if is_common else {table_id: _row_keys(table_steps) for table_id, table_steps in steps.items()}
    row_keys = first if is_common else np.unique(np.concatenate(list(keys.values())))
    cells = [_format_numbers(np.real(row_keys))]
    for _, table, index in columns:
        texts = _format_numbers(np.array(table.columns[index]))
        if not is_common and len(texts) < len(row_keys):
            filled = [""] * len(row_keys)
            for row, text in zip(np.searchsorted(row_keys, keys[id(table)]).tolist(), texts, strict=True):
                filled[row] = text
            texts = filled
        cells.append(texts)
    head = io.StringIO()
    csv.writer(head, lineterminator="\n").writerow(["step", *(_escape_formula(label) for label, _, _ in columns)])
    return head.getvalue() + "".join([f"{','.join(row)}\n" for row in zip(*cells, strict=True)])


def save_csv(state: PanelState, folder: str = ".") -> str:
    """Write the CSV into a folder, under a new name, and return the name."""
    return new_file(to_csv(state), state.title, "csv", folder)


def new_file(text: str, title: str, extension: str, folder: str) -> str:
    """Write a text file that is named after a run; return its name, with a number added if the name is in use."""
    safe = "".join(char if char.isalnum() or char in "-_" else "-" for char in title).strip("-")[:MAX_NAME] or "run"
    for number in itertools.count(1):
        name = f"{safe}{'' if number == 1 else f'-{number}'}.{extension}"
        try:
            with open(os.path.join(folder, name), "x", encoding="utf-8") as file:
                file.write(text)
            return name
        except FileExistsError:
            continue
    raise AssertionError("the count is infinite")


def _columns(state: PanelState) -> Iterator[tuple[str, Table, int]]:
    """Yield label, table and column index of each CSV column after the step."""
    for name in state.loss_names:
        label = name or "loss"
        yield from _by_rank(state, "step", name, label, 1)
        mean = state.tables.mean("step", name)
        assert mean is not None, "a loss has rows"
        suffix = f" of {label}" if len(state.loss_names) > 1 else ""
        for index, column in enumerate(STEP_COLUMNS[2:], 2):
            if column == "step time":
                yield from _by_rank(state, "step", name, f"step time in ms{suffix}", index)
            elif column != "samples":
                yield {"time": "time in s"}.get(column, column) + suffix, mean, index
    for name in state.metrics:
        yield from _by_rank(state, "metric", name, name, 1)


def _by_rank(state: PanelState, kind: str, name: str, label: str, index: int) -> Iterator[tuple[str, Table, int]]:
    tables = {rank: table for (k, rank, n), table in sorted(state.tables.items()) if (k, n) == (kind, name)}
    for rank, table in tables.items():
        if len(table):
            is_only = len(tables) == 1 or rank == MEAN_RANK
            yield (label if is_only else f"{label}, rank {rank}"), table, index


def _is_increasing(steps: NDArray[np.float64]) -> bool:
    return bool((steps[1:] > steps[:-1]).all())


def _format_numbers(values: NDArray[np.float64]) -> list[str]:
    """Return the shortest strings that parse to the same numbers."""
    import numpy as np

    if len(values) and bool((values == values[0]).all()):
        return [_format_number(float(values[0]))] * len(values)
    with np.errstate(invalid="ignore"):
        whole = values.astype(np.int64)
    if bool((whole == values).all()):
        return list(map(str, whole.tolist()))
    return list(map(repr, values.tolist()))


def _format_number(value: float) -> str:
    return str(int(value)) if value.is_integer() else repr(value)


def _row_keys(steps: NDArray[np.float64]) -> NDArray[np.complex128]:
    """Return a unique key for each row: its step, and as the imaginary part its index among rows of that step."""
    import numpy as np

    return steps + 1j * (np.arange(len(steps)) - np.searchsorted(steps, steps))


def _escape_formula(label: str) -> str:
    """Return a heading that a spreadsheet does not evaluate as a formula."""
    return f"'{label}" if label[:1] in ("=", "+", "-", "@", "\t", "\r") else label
