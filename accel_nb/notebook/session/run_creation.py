"""The run of a cell before it starts: its output with the panel, and its controls."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from accel_nb.config import Resolved
from accel_nb.config.message_text import ranks_text
from accel_nb.notebook.cells.cell_analysis import CellNames
from accel_nb.notebook.cells.loop_plan import find_loop_plan
from accel_nb.notebook.output.cell_output import make_output
from accel_nb.notebook.session.recording import describe_run
from accel_nb.notebook.session.run_controls import RunControls
from accel_nb.notebook.session.run_state import Cell, CellRun
from accel_nb.pool.engine import WorkerSpec
from accel_nb.telemetry.metrics import Exporters
from accel_nb.ui.panel import Panel
from accel_nb.ui.run_comparison import EarlierRuns


def create_run(
    cell: Cell,
    names: CellNames,
    resolved: Resolved,
    specs: Sequence[WorkerSpec],
    *,
    mode: str,
    is_new: bool,
    namespace: Mapping[str, Any],
    exporters: Exporters,
    earlier_runs: EarlierRuns,
) -> CellRun:
    """Create the run of a cell and show its output. ``is_new``: whether these workers are to be started."""
    config = resolved.config
    shown = range(len(specs)) if config.show_ranks == "all" else {0, *config.show_ranks}
    if config.ranks is not None and 0 not in config.ranks and not config.show_ranks:
        shown = config.ranks
    title = config.name or (f"cell {cell.execution_count}" if cell.call is None else cell.call.name)
    controls = RunControls(can_save=config.checkpoint.dir is not None)
    metrics = exporters.use(config.metrics)
    panel = Panel(
        title,
        len(specs),
        mode=mode,  # type: ignore[arg-type]
        on_control=controls.handle_message,
        can_save=controls.can_save,
        on_events=exporters.export,
        earlier=earlier_runs,
        plan=None if cell.call is not None else find_loop_plan(cell.tree, namespace),
    )
    started = time.time()
    panel.state.describe = lambda: describe_run(cell.source, resolved, specs, started)
    controls.show_message, controls.record_event = panel.show_action_result, lambda event: panel.feed([event])
    prefix = None if cell.call is None else cell.call.line_prefix
    output = make_output(
        specs,
        panel=panel,
        shown_ranks=range(len(specs)) if prefix else shown,
        is_new=is_new,
        prefix=prefix,
        is_same_on_ranks=not names.is_explicit and cell.call is None and config.divide != "data",
    )
    lines = [*resolved.notes, *metrics, *(() if cell.call is None else cell.call.notes)]
    if config.ranks is not None and 0 not in config.ranks and names.bound:
        lines.append(f"bound on {ranks_text(config.ranks)} only: {', '.join(names.bound)}")
    return CellRun(title, names, output, controls, config, specs, closing_lines=lines)
