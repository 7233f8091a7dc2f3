"""The panel as a picture, for saved notebooks, nbconvert and viewers without widgets."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from accel_nb.ui.view import MEAN_RANK, MEMORY_COLUMNS, STEP_COLUMNS, PanelState

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from accel_nb.ui.series_table import Table

MAX_POINTS = 1500
MAX_RAW_ROWS = 500
"""A curve with more steps is drawn as a band."""

MAX_BANDS = 250
MAX_POINT_MARKERS = 60
"""Each point of a validation loss with at most this many is marked."""

MAX_MAPS = 4
MAX_LINES = 16
DPI = 144

RANK_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8c6bb1", "#7f7f7f")
VALIDATION_COLORS = ("#cc79a7", "#e69f00", "#56b4e9")
MEMORY_COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#9a9a9a")
MARK_COLORS = {
    "nan": "#d55e00",
    "skipped": "#e69f00",
    "restart": "#7f7f7f",
    "failed": "#d55e00",
    "interrupted": "#8c6bb1",
    "checkpoint": "#009e73",
    "steered": "#0072b2",
    "begins": "#7f7f7f",
}
STATUS_COLORS = {"running": "#0072b2", "done": "#00805c", "failed": "#d55e00", "interrupted": "#8c6bb1"}

INK, FAINT, GRID = "#1f2328", "#656d76", "#e4e7eb"


def draw_png(state: PanelState) -> bytes:
    """Draw the state with matplotlib, without pyplot, which would choose a backend and keep the figure."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_style()):
        figure = Figure(figsize=(9.6, 3.5), dpi=DPI, facecolor="white")
        ranks = [rank for kind, rank, _ in state.tables if kind == "memory"]
        shown = sorted(ranks)[:MAX_MAPS]
        grid = figure.add_gridspec(
            max(1, len(shown)),
            2 if shown else 1,
            width_ratios=(3, 2) if shown else (1,),
            left=0.065,
            right=0.985,
            top=0.81,
            bottom=0.12,
            wspace=0.2,
            hspace=0.28,
        )
        _draw_curve(figure.add_subplot(grid[:, 0]), state)
        maps = [figure.add_subplot(grid[row, 1]) for row in range(len(shown))]
        _draw_memory(maps, state, shown, num_ranks=len(ranks))
        figure.text(0.012, 0.955, state.status, color=STATUS_COLORS[state.status], weight="bold", va="center")
        offset = 0.012 + 0.0083 * (len(state.status) + 1.2)
        figure.text(offset, 0.955, _escape_math(f"{state.title}:  {state.summary()}"), color=INK, va="center")
        notes = "  ·  ".join(state.notes())
        if notes:
            figure.text(0.985, 0.955, _escape_math(notes[:70]), color="#b04e00", va="center", ha="right", size=8)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
    return _compressed(canvas)


def _compressed(canvas: FigureCanvasAgg) -> bytes:
    """Return the PNG with a palette: a third of the size, without a visible difference in line drawings."""
    import numpy as np
    from PIL import Image

    image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    buffer = io.BytesIO()
    reduced = image.quantize(128, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    reduced.save(buffer, "PNG", optimize=True, dpi=(DPI, DPI))
    return buffer.getvalue()


def _draw_curve(axes: Axes, state: PanelState) -> None:
    """Draw the loss, or the first metric of a cell without steps: ranks as faint lines, their mean as a bold one."""
    kind, name = _main_curve(state)
    tables = {rank: table for (k, rank, n), table in state.tables.items() if (k, n) == (kind, name) and len(table)}
    ranks = sorted(rank for rank in tables if rank != MEAN_RANK)
    is_alone = len(ranks) == 1
    for rank in ranks[:MAX_LINES]:
        color = RANK_COLORS[rank % len(RANK_COLORS)]
        _draw_line(axes, tables[rank], color, None if is_alone else f"rank {rank}", is_bold=is_alone)
    if len(ranks) > 1 and MEAN_RANK in tables:
        _draw_line(axes, tables[MEAN_RANK], INK, "mean", is_bold=True, has_band=False)
    validation = state.validation_losses(name) if kind == "step" else {}
    if validation and is_alone:
        axes.lines[-1].set_label(_escape_math(name[:40]) or "loss")
    for color, (metric, table) in zip(VALIDATION_COLORS, validation.items(), strict=False):
        points = table.picked(MAX_POINTS)
        is_sparse = points.shape[1] <= MAX_POINT_MARKERS
        axes.plot(
            points[0],
            points[1],
            color=color,
            lw=1.5,
            marker="o" if is_sparse else None,
            ms=3,
            label=_escape_math(metric[:40]),
        )
    for mark in state.marks:
        is_small = mark.kind == "checkpoint"  # frequent: a tick at the top
        line = {"ymin": 0.96, "lw": 2.0} if is_small else {"lw": 0.8, "ls": (0, (3, 3))}
        axes.axvline(mark.x, color=MARK_COLORS[mark.kind], **line)
    axes.set_title("loss" if kind == "step" else _escape_math(name[:40]), loc="left")
    axes.set_xlabel("step", labelpad=1)
    axes.margins(x=0.01)
    handles, labels = axes.get_legend_handles_labels()
    if 1 < len(labels) <= 9:
        _legend_above(axes, handles, labels)


def _draw_line(
    axes: Axes, table: Table, color: str, label: str | None, *, is_bold: bool, has_band: bool = True
) -> None:
    """Draw a curve; of a long one the mean of each block of steps, on the band from its lowest to its highest value."""
    width, alpha = (1.5, 1.0) if is_bold else (0.8, 0.55)
    if len(table) > MAX_RAW_ROWS:
        xs, low, high, mean = table.bands(MAX_BANDS)
        if has_band:
            axes.fill_between(xs, low, high, color=color, alpha=0.22 if is_bold else 0.12, lw=0)
        axes.plot(xs, mean, color=color, lw=width, alpha=alpha, label=label)
        return
    xs, ys = table.picked(MAX_RAW_ROWS)[:2]
    axes.plot(xs, ys, color=color, lw=width, alpha=alpha, marker="o" if len(xs) < 3 else None, ms=3, label=label)


def _draw_memory(maps: list[Axes], state: PanelState, ranks: list[int], *, num_ranks: int) -> None:
    """Draw one stacked area for each rank, on common scales in MiB or GiB."""
    import numpy as np

    points_by_rank = {rank: state.tables["memory", rank, ""].picked(MAX_POINTS // 3) for rank in ranks}
    top = max((points[-1].max() for points in points_by_rank.values()), default=1.0) or 1.0
    end = max((points[0][-1] for points in points_by_rank.values()), default=1.0) or 1e-3
    unit, size = ("GiB", 2**30) if top >= 2**30 else ("MiB", 2**20)
    for index, (axes, rank) in enumerate(zip(maps, ranks, strict=True)):
        points = points_by_rank[rank]
        if points.shape[1] == 1:  # a single sample would have no width
            points = np.repeat(points, 2, axis=1)
            points[0, 1] = max(end, points[0, 0] + 1e-3)
        axes.stackplot(points[0], points[1:6] / size, colors=MEMORY_COLORS, labels=MEMORY_COLUMNS[1:6], lw=0)
        axes.set_xlim(0, max(end, 1e-3))
        axes.set_ylim(0, top / size * 1.08)
        axes.locator_params(axis="y", nbins=4 if len(ranks) < 3 else 2)
        device = state.device(rank)
        caption = f"rank {rank}" + (f" · {_escape_math(device)}" if device else "")
        axes.text(
            0.985, 0.93, caption, transform=axes.transAxes, ha="right", va="top", color=INK, size=7.5, bbox=_CAPTION
        )
        if index < len(maps) - 1:
            axes.tick_params(labelbottom=False)
        else:
            axes.set_xlabel("seconds", labelpad=1)
    if maps:
        more = f", {len(ranks)} of {num_ranks} ranks" if num_ranks > len(ranks) else ""
        maps[0].set_title(f"memory, {unit}{more}", loc="left", pad=17)  # the legend needs the whole row below
        _legend_above(maps[0], *maps[0].get_legend_handles_labels())


_CAPTION = {"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 1.5}


def _legend_above(axes: Axes, handles: list[Any], labels: list[str]) -> None:
    axes.legend(
        handles,
        labels,
        loc="lower right",
        bbox_to_anchor=(1.01, 0.985),
        ncols=len(labels),
        frameon=False,
        fontsize=7,
        handlelength=1,
        handletextpad=0.4,
        columnspacing=0.9,
        borderpad=0.1,
    )


def _main_curve(state: PanelState) -> tuple[str, str]:
    if state.loss_names:
        return "step", state.loss_names[0]
    return "metric", next(iter(state.metrics), "")


def _escape_math(text: str) -> str:
    """Escape dollar signs, between which matplotlib typesets mathematics."""
    return text.replace("$", r"\$")


def _style() -> Any:
    return {
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 8.5,
        "axes.titlesize": 9,
        "axes.titleweight": "bold",
        "axes.titlepad": 5,
        "axes.edgecolor": GRID,
        "axes.labelcolor": FAINT,
        "axes.labelsize": 8,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.formatter.useoffset": False,
        "grid.color": GRID,
        "grid.linewidth": 0.7,
        "text.color": INK,
        "text.parse_math": False,
        "xtick.color": FAINT,
        "ytick.color": FAINT,
        "xtick.labelsize": 7.5,
        "ytick.labelsize": 7.5,
        "xtick.major.size": 2.5,
        "ytick.major.size": 2.5,
        "path.simplify": True,
    }


assert len(MEMORY_COLORS) == len(MEMORY_COLUMNS) - 3, "time, free and total are not stacked"
assert STEP_COLUMNS[1] == "loss", "the picture draws the first value column of the step table"
