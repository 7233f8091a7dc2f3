"""The receipt: the line at the top of a cell's output with devices, strategy and precision, as the workers report."""

from __future__ import annotations

import html
from collections.abc import Sequence

from accel_nb.pool.engine import WorkerSpec
from accel_nb.telemetry.events import WorkerPrepared

_STYLE = (
    "font-family: var(--jp-code-font-family, monospace); font-size: 12px; opacity: 0.75; "
    "padding: 2px var(--jp-code-padding, 0)"
)


def starting_line(specs: Sequence[WorkerSpec], *, is_new: bool) -> str:
    """Return the receipt to show before the workers have reported."""
    return f"{workers_text(specs)} · {'starting' if is_new else 'running'}"


def receipt_line(specs: Sequence[WorkerSpec], reports: Sequence[WorkerPrepared]) -> str:
    """Return the receipt of a cell; ``reports`` has the last report of each rank that sent one, in any order."""
    if not reports:
        return f"{workers_text(specs)} · nothing to prepare"
    reports = sorted(reports, key=lambda report: report.rank)
    main = reports[0]
    parts = [workers_text(specs), _common_value("strategy", [(r.rank, r.strategy) for r in reports])]
    parts.append("precision " + _common_value("precision", [(r.rank, r.precision) for r in reports]))
    if main.objects:
        parts.append("prepared " + ", ".join(main.objects))
    parts += main.notes
    return " · ".join(parts)


def display_bundle(line: str) -> dict[str, str]:
    """Return a line as a display bundle."""
    return {"text/plain": line, "text/html": f'<div style="{_STYLE}">{html.escape(line)}</div>'}


def workers_text(specs: Sequence[WorkerSpec]) -> str:
    """Return the number of workers and their devices."""
    devices = [spec.device for spec in specs]
    count = f"{len(devices)} worker{'s' if len(devices) != 1 else ''}"
    if set(devices) == {"cpu"}:
        return f"{count} on cpu, {specs[0].num_threads} thread{'s' if specs[0].num_threads != 1 else ''} each"
    return f"{count} on {', '.join(devices)}"


def _common_value(label: str, values: Sequence[tuple[int, str]]) -> str:
    """Return the value that all ranks report, or each rank's value if they differ."""
    if len({value for _, value in values}) == 1:
        return values[0][1]
    return f"{label} DIFFERS: " + ", ".join(f"rank {rank} {value}" for rank, value in values)
