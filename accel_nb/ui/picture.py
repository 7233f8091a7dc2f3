"""The panel as a picture, for saved notebooks, nbconvert and viewers without widgets."""

from __future__ import annotations

from accel_nb.ui.agg_canvas import AggCanvas, Box
from accel_nb.ui.plot_axes import INK, PlotAxes, range_of
from accel_nb.ui.view import MEAN_RANK, MEMORY_COLUMNS, STEP_COLUMNS, PanelState

MAX_POINTS = 1500
MAX_MAPS = 4
MAX_LINES = 16
WIDTH, HEIGHT, DPI = 1382, 504, 144
"""Pixels, and pixels per inch."""


RANK_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8c6bb1", "#7f7f7f")
MEMORY_COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#9a9a9a")
MARK_COLORS = {
    "nan": "#d55e00",
    "skipped": "#e69f00",
    "restart": "#7f7f7f",
    "failed": "#d55e00",
    "interrupted": "#8c6bb1",
    "checkpoint": "#009e73",
    "steered": "#0072b2",
}
STATUS_COLORS = {"running": "#0072b2", "done": "#00805c", "failed": "#d55e00", "interrupted": "#8c6bb1"}

LEFT, BOTTOM, RIGHT, TOP = 90, 60, 1361, 408
"""The edges of the plots; what is above and below has titles and the texts of ticks."""
MAP_LEFT = 899
"""Where memory maps begin."""
MAP_GAP = 42
WARNING = "#b04e00"


def draw_png(state: PanelState) -> bytes:
    """Draw the state: its curve, and memory beside it."""
    canvas = AggCanvas(WIDTH, HEIGHT, DPI)
    ranks = sorted(rank for kind, rank, _ in state.tables if kind == "memory")
    _draw_curve(canvas, (LEFT, BOTTOM, MAP_LEFT - 115 if ranks else RIGHT, TOP), state)
    _draw_memory(canvas, state, ranks)
    line = HEIGHT * 0.955
    start = 17 + canvas.text(17, line, state.status, size=8.5, color=STATUS_COLORS[state.status], is_bold=True) + 14
    canvas.text(start, line, f"{state.title}:  {state.summary()}", size=8.5, color=INK)
    if notes := "  ·  ".join(state.notes()):
        canvas.text(RIGHT, line, notes[:70], size=8, color=WARNING, anchor="right")
    return canvas.png()


def _draw_curve(canvas: AggCanvas, box: Box, state: PanelState) -> None:
    """Draw the loss, or the first metric of a cell without steps: ranks as faint lines, their mean as a bold one."""
    kind, name = _main_curve(state)
    tables = {rank: table for (k, rank, n), table in state.tables.items() if (k, n) == (kind, name) and len(table)}
    points = {rank: table.picked(MAX_POINTS) for rank, table in tables.items()}
    ranks = sorted(rank for rank in points if rank != MEAN_RANK)[:MAX_LINES]
    marks = [[mark.x] for mark in state.marks]
    axes = PlotAxes(
        canvas,
        box,
        range_of([*(xs for xs, *_ in points.values()), *marks], 0.01),
        range_of([ys for _, ys, *_ in points.values()], 0.05),
    )
    axes.frame("step", num_y_ticks=7)
    is_alone = len(ranks) == 1
    entries: list[tuple[str, str, float]] = []
    for rank in ranks:
        xs, ys, *_ = points[rank]
        color, width, alpha = RANK_COLORS[rank % len(RANK_COLORS)], 1.5 if is_alone else 0.8, 1 if is_alone else 0.55
        axes.curve(xs, ys, color, width, alpha=alpha, has_dots=len(xs) < 3)
        entries.append((f"rank {rank}", color, alpha))
    if not is_alone and MEAN_RANK in points:
        xs, ys, *_ = points[MEAN_RANK]
        axes.curve(xs, ys, INK, 1.5)
        entries.append(("mean", INK, 1.0))
    for mark in state.marks:
        axes.vertical(mark.x, MARK_COLORS[mark.kind], is_short=mark.kind == "checkpoint")  # those are frequent
    axes.title("loss" if kind == "step" else name[:40], above=15)
    if 1 < len(entries) <= 9:
        axes.legend(entries, is_line=True)


def _draw_memory(canvas: AggCanvas, state: PanelState, ranks: list[int]) -> None:
    """Draw one stacked area for each of the first ranks, on common scales in MiB or GiB."""
    import numpy as np

    shown = ranks[:MAX_MAPS]
    points_by_rank = {rank: state.tables["memory", rank, ""].picked(MAX_POINTS // 3) for rank in shown}
    largest = max((points[-1].max() for points in points_by_rank.values()), default=1.0) or 1.0
    end = max((points[0][-1] for points in points_by_rank.values()), default=1.0) or 1e-3
    unit, size = ("GiB", 2**30) if largest >= 2**30 else ("MiB", 2**20)
    height = (TOP - BOTTOM - MAP_GAP * (len(shown) - 1)) / max(1, len(shown))
    for index, (rank, points) in enumerate(points_by_rank.items()):
        if points.shape[1] == 1:  # a single sample would have no width
            points = np.repeat(points, 2, axis=1)
            points[0, 1] = max(end, points[0, 0] + 1e-3)
        top = TOP - index * (height + MAP_GAP)
        box = (MAP_LEFT, top - height, RIGHT, top)
        axes = PlotAxes(canvas, box, (0, max(end, 1e-3)), (0, largest / size * 1.08))
        is_last = index == len(shown) - 1
        axes.frame("seconds" if is_last else "", num_y_ticks=4 if len(shown) < 3 else 2, shows_x_ticks=is_last)
        axes.stack(points[0], points[1:6] / size, MEMORY_COLORS)
        device = state.device(rank)
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
