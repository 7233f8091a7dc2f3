"""All rows of a panel as CSV: every step of every curve."""

from __future__ import annotations

import csv
import io
import itertools
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from accel_nb.ui.view import MEAN_RANK, STEP_COLUMNS, PanelState

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from accel_nb.ui.series_table import Table

MAX_NAME = 80


def to_csv(state: PanelState) -> str:
    """Return a row for each step, with the mean over ranks and each rank's value of every loss and metric.

    Numbers are written so that no digit is lost. A cell is empty where a curve has no value at the step.
    """
    import numpy as np

    columns = list(_columns(state))
    steps = {id(table): np.array(table.columns[0]) for _, table, _ in columns}
    first = next(iter(steps.values()), np.zeros(0))
    is_common = _is_increasing(first) and all(np.array_equal(first, own) for own in steps.values())
    # Values that were logged several times in a step are rows of their own: the imaginary part counts them.
    keys = {} if is_common else {which: _numbered(own) for which, own in steps.items()}
    places = first if is_common else np.unique(np.concatenate(list(keys.values())))
    cells = [_texts(np.real(places))]
    for _, table, index in columns:
        texts = _texts(np.array(table.columns[index]))
        if not is_common and len(texts) < len(places):
            filled = [""] * len(places)
            for place, text in zip(np.searchsorted(places, keys[id(table)]).tolist(), texts, strict=True):
                filled[place] = text
            texts = filled
        cells.append(texts)
    head = io.StringIO()
    csv.writer(head, lineterminator="\n").writerow(["step", *(_harmless(label) for label, _, _ in columns)])
    return head.getvalue() + "".join([f"{','.join(row)}\n" for row in zip(*cells, strict=True)])


def save_csv(state: PanelState, folder: str = ".") -> str:
    """Write the CSV into a folder, under a new name, and return the name."""
    return new_file(to_csv(state), state.title, "csv", folder)


def new_file(text: str, title: str, extension: str, folder: str) -> str:
    """Write a text file that is named after a run; return its name, which has a number where it exists already."""
    safe = "".join(char if char.isalnum() or char in "-_" else "-" for char in title).strip("-")[:MAX_NAME] or "run"
    for number in itertools.count(1):
        name = f"{safe}{'' if number == 1 else f'-{number}'}.{extension}"
        try:
            with open(os.path.join(folder, name), "x", encoding="utf-8") as file:
                file.write(text)
            return name
        except FileExistsError:
            continue
    raise AssertionError("numbers do not end")


def _columns(state: PanelState) -> Iterator[tuple[str, Table, int]]:
    """Yield label, table and column of everything that a row has."""
    for name in state.loss_names:
        label = name or "loss"
        yield from _by_rank(state, "step", name, label, 1)
        shown = state.mean("step", name)
        assert shown is not None, "a loss has rows"
        of = f" of {label}" if len(state.loss_names) > 1 else ""
        for index, column in enumerate(STEP_COLUMNS[2:], 2):
            if column == "step time":
                yield from _by_rank(state, "step", name, f"step time in ms{of}", index)
            elif column != "samples":
                yield {"time": "time in s"}.get(column, column) + of, shown, index
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


def _texts(values: NDArray[np.float64]) -> list[str]:
    """Return the shortest texts that are read as the same numbers."""
    import numpy as np

    if len(values) and bool((values == values[0]).all()):
        return [_text(float(values[0]))] * len(values)
    with np.errstate(invalid="ignore"):
        whole = values.astype(np.int64)
    if bool((whole == values).all()):
        return list(map(str, whole.tolist()))
    return list(map(repr, values.tolist()))


def _text(value: float) -> str:
    return str(int(value)) if value.is_integer() else repr(value)


def _numbered(steps: NDArray[np.float64]) -> NDArray[np.complex128]:
    import numpy as np

    return steps + 1j * (np.arange(len(steps)) - np.searchsorted(steps, steps))


def _harmless(label: str) -> str:
    """Return a heading that a spreadsheet does not read as a formula."""
    return f"'{label}" if label[:1] in ("=", "+", "-", "@", "\t", "\r") else label
