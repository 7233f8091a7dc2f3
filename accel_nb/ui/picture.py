"""The panel as a picture, for saved notebooks, nbconvert and viewers without widgets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel_nb.ui.agg_canvas import AggCanvas, Box
from accel_nb.ui.panel_tables import MEAN_RANK, MEMORY_COLUMNS, STEP_COLUMNS
from accel_nb.ui.plot_axes import INK, PlotAxes, range_of
from accel_nb.ui.series_table import Table
from accel_nb.ui.view import PanelState

MAX_POINTS = 1500
MAX_RAW_ROWS = 500
"""A curve with more steps is drawn as a band."""

MAX_BANDS = 250
MAX_POINT_MARKERS = 60
"""Each point of a validation loss with at most this many is marked."""

MAX_MEMORY_CHARTS = 4
MAX_LINES = 16
WIDTH, HEIGHT, DPI = 1382, 504, 144
"""Pixels, and pixels per inch."""


RANK_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8c6bb1", "#7f7f7f")
VALIDATION_COLORS = ("#e69f00", "#cc79a7", "#56b4e9")
MEMORY_COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#9a9a9a")
MARK_COLORS = {
    "nan": "#d55e00",
    "skipped": "#e69f00",
    "restart": "#7f7f7f",
    "failed": "#d55e00",
    "interrupted": "#8c6bb1",
    "checkpoint": "#009e73",
    "control": "#0072b2",
    "begins": "#7f7f7f",
}
STATUS_COLORS = {"running": "#0072b2", "done": "#00805c", "failed": "#d55e00", "interrupted": "#8c6bb1"}

LEFT, BOTTOM, RIGHT, TOP = 90, 60, 1361, 408
"""The edges of the plots; what is above and below has titles and the labels of ticks."""
MEMORY_LEFT = 899
"""The left edge of memory charts."""
MEMORY_GAP = 42
WARNING = "#b04e00"


def draw_png(state: PanelState) -> bytes:
    """Draw the state: its curve, and memory beside it."""
    canvas = AggCanvas(WIDTH, HEIGHT, DPI)
    ranks = sorted(rank for kind, rank, _ in state.tables if kind == "memory")
    _draw_curve(canvas, (LEFT, BOTTOM, MEMORY_LEFT - 115 if ranks else RIGHT, TOP), state)
    _draw_memory(canvas, state, ranks)
    line = HEIGHT * 0.955
    start = 17 + canvas.text(17, line, state.status, size=8.5, color=STATUS_COLORS[state.status], is_bold=True) + 14
    canvas.text(start, line, f"{state.title}:  {state.summary()}", size=8.5, color=INK)
    if notes := "  ·  ".join(state.notes()):
        canvas.text(RIGHT, line, notes[:70], size=8, color=WARNING, anchor="right")
    return canvas.png()


@dataclass
class _Line:
    """A curve; ``low`` and ``high`` are the edges of its band, if it has one."""

    label: str
    color: str
    xs: Any
    ys: Any
    width: float = 1.5
    alpha: float = 1.0
    has_dots: bool = False
    low: Any = None
    high: Any = None


def _draw_curve(canvas: AggCanvas, box: Box, state: PanelState) -> None:
    """Draw the loss, or the first metric of a cell without steps: ranks as faint lines, their mean as a bold one."""
    kind, name = _main_curve(state)
    tables = {rank: table for (k, rank, n), table in state.tables.items() if (k, n) == (kind, name) and len(table)}
    ranks = sorted(rank for rank in tables if rank != MEAN_RANK)
    is_alone = len(ranks) == 1
    lines = [
        _line(tables[rank], f"rank {rank}", RANK_COLORS[rank % len(RANK_COLORS)], is_bold=is_alone)
        for rank in ranks[:MAX_LINES]
    ]
    if len(ranks) > 1 and MEAN_RANK in tables:
        mean = _line(tables[MEAN_RANK], "mean", INK, is_bold=True)
        mean.low = mean.high = None
        lines.append(mean)
    validation = state.validation_losses(name) if kind == "step" else {}
    if validation and is_alone:
        lines[0].label = name[:40] or "loss"
    for color, (metric, table) in zip(VALIDATION_COLORS, validation.items(), strict=False):
        xs, ys, *_ = table.downsampled(MAX_POINTS)
        lines.append(_Line(metric[:40], color, xs, ys, has_dots=len(xs) <= MAX_POINT_MARKERS))
    across = [*(line.xs for line in lines), *([mark.x] for mark in state.marks)]
    edges = [values for line in lines for values in (line.ys, line.low, line.high) if values is not None]
    axes = PlotAxes(canvas, box, range_of(across, 0.01), range_of(edges, 0.05))
    axes.frame("step", num_y_ticks=7)
    for line in lines:
        if line.low is not None:
            axes.band(line.xs, line.low, line.high, line.color, alpha=0.22 if is_alone else 0.12)
        axes.curve(line.xs, line.ys, line.color, line.width, alpha=line.alpha, has_dots=line.has_dots)
    for mark in state.marks:
        axes.vertical(mark.x, MARK_COLORS[mark.kind], is_short=mark.kind == "checkpoint")  # those are frequent
    axes.title("loss" if kind == "step" else name[:40], above=15)
    if 1 < len(lines) <= 9:
        axes.legend([(line.label, line.color, line.alpha) for line in lines], is_line=True)


def _line(table: Table, label: str, color: str, *, is_bold: bool) -> _Line:
    """Return a curve; of a long one the mean of each block of steps, with the band from its lowest to highest value."""
    width, alpha = (1.5, 1.0) if is_bold else (0.8, 0.55)
    if len(table) > MAX_RAW_ROWS:
        xs, low, high, mean = table.bands(MAX_BANDS)
        return _Line(label, color, xs, mean, width, alpha, low=low, high=high)
    xs, ys, *_ = table.downsampled(MAX_RAW_ROWS)
    return _Line(label, color, xs, ys, width, alpha, has_dots=len(xs) < 3)


def _draw_memory(canvas: AggCanvas, state: PanelState, ranks: list[int]) -> None:
    """Draw one stacked area for each of the first ranks, on common scales in MiB or GiB."""
    import numpy as np

    shown = ranks[:MAX_MEMORY_CHARTS]
    points_by_rank = {rank: state.tables["memory", rank, ""].downsampled(MAX_POINTS // 3) for rank in shown}
    largest = max((points[-1].max() for points in points_by_rank.values()), default=1.0) or 1.0
    end = max((points[0][-1] for points in points_by_rank.values()), default=1.0) or 1e-3
    unit, size = ("GiB", 2**30) if largest >= 2**30 else ("MiB", 2**20)
    height = (TOP - BOTTOM - MEMORY_GAP * (len(shown) - 1)) / max(1, len(shown))
    for index, (rank, points) in enumerate(points_by_rank.items()):
        if points.shape[1] == 1:  # a single sample would have no width
            points = np.repeat(points, 2, axis=1)
            points[0, 1] = max(end, points[0, 0] + 1e-3)
        top = TOP - index * (height + MEMORY_GAP)
        box = (MEMORY_LEFT, top - height, RIGHT, top)
        axes = PlotAxes(canvas, box, (0, max(end, 1e-3)), (0, largest / size * 1.08))
        is_last = index == len(shown) - 1
        axes.frame("seconds" if is_last else "", num_y_ticks=4 if len(shown) < 3 else 2, shows_x_ticks=is_last)
        axes.stack(points[0], points[1:6] / size, MEMORY_COLORS)
        device = state.ranks[rank].device
        axes.caption(f"rank {rank}" + (f" · {device}" if device else ""))
        if index == 0:
            more = f", {len(shown)} of {len(ranks)} ranks" if len(ranks) > len(shown) else ""
            axes.title(f"memory, {unit}{more}", above=39)  # the legend needs the whole row below
            axes.legend([(n, c, 1.0) for n, c in zip(MEMORY_COLUMNS[1:6], MEMORY_COLORS, strict=True)], is_line=False)


def _main_curve(state: PanelState) -> tuple[str, str]:
    if state.loss_names:
        return "step", state.loss_names[0]
    return "metric", next(iter(state.metrics), "")


assert len(MEMORY_COLORS) == len(MEMORY_COLUMNS) - 3, "time, free and total are not stacked"
assert STEP_COLUMNS[1] == "loss", "the picture draws the first value column of the step table"
