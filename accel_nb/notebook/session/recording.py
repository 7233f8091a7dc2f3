"""Records, in the run registry, of cells that trained, made at their end from the state of their panel."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence

from accel_nb.config import Resolved, flags_to_line
from accel_nb.errors import error_text
from accel_nb.pool.engine import WorkerSpec
from accel_nb.runs import RunRegistry
from accel_nb.runs.facts import environment_facts
from accel_nb.runs.notification import RunEnd
from accel_nb.runtime.process.platforms import find_notebook
from accel_nb.ui.series_table import Table
from accel_nb.ui.view import PanelState

logger = logging.getLogger(__name__)

GIT_TIMEOUT_S = 0.2
MAX_POINTS = 200


def end_of_run(state: PanelState, duration_s: float, error: BaseException | None) -> RunEnd:
    """Return the end of a cell, from the state of its panel."""
    losses = state.facts()["losses"]
    metrics = {fact["name"]: float(fact["value"]) for fact in losses if fact["value"] is not None}
    metrics |= {_metric_name(state, name): value for name, value in state.metrics.items() if math.isfinite(value)}
    return RunEnd(
        state.title,
        "done" if error is None else "interrupted" if isinstance(error, KeyboardInterrupt) else "failed",
        duration_s,
        state.ranks.num_steps,
        metrics,
        None if error is None else f"{type(error).__name__}: {error_text(error)}"[:2000],
    )


def record_run(source: str, resolved: Resolved, state: PanelState, end: RunEnd) -> None:
    """Record a cell that has ended. Skip one without steps and metrics, or without a panel. An error is logged."""
    if not state.has_data:
        return
    try:
        recording = RunRegistry().begin(
            "cell",
            _first_line(source),
            resolved,
            name=end.name,
            notebook=find_notebook(),
            started=time.time() - end.duration_s,
            git_timeout_s=GIT_TIMEOUT_S,
        )
        recording.log(_curves(state))
        recording.finish(
            end.outcome,
            error=end.error,
            num_steps=end.num_steps,
            metrics=end.metrics,
            checkpoints=tuple(mark.text.removeprefix("saved to ") for mark in state.marks if mark.kind == "checkpoint"),
        )
    except Exception:
        logger.warning("the run is not recorded", exc_info=True)


def describe_run(source: str, resolved: Resolved, specs: Sequence[WorkerSpec], started: float) -> dict[str, str]:
    """Return code, options and environment of a run as short strings, to copy and share."""
    facts = environment_facts()
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    try:
        options = flags_to_line(resolved.config)
    except ValueError:  # a value that no flag can have
        options = ""
    return {
        "options": options or "defaults",
        "workers": ", ".join(spec.device for spec in specs),
        "started": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(started)),
        "environment": f"Python {facts['python']}, {packages}, {facts['system']}",
        "code": source,
    }


def _curves(state: PanelState) -> Iterator[tuple[int, Mapping[str, float | str]]]:
    """Yield losses and metrics, means over ranks: at most `MAX_POINTS` points of each, the last one included."""
    curves: dict[str, Table] = {}
    for (kind, _, name), table in sorted(state.tables.items()):  # the mean is stored under the lowest rank number
        if kind in ("step", "metric") and len(table):
            curves.setdefault((name or "loss") if kind == "step" else _metric_name(state, name), table)
    for name, table in curves.items():
        steps, values = table.downsampled(MAX_POINTS)[:2].tolist()
        for step, value in zip([*steps, table.columns[0][-1]], [*values, table.columns[1][-1]], strict=True):
            yield int(step), {name: value if math.isfinite(value) else repr(value)}


def _metric_name(state: PanelState, name: str) -> str:
    """Return the name under which a logged metric is recorded: another than that of a loss of the steps."""
    return f"{name} (logged)" if name in [loss or "loss" for loss in state.loss_names] else name


def _first_line(source: str) -> str:
    """Return the first line of a cell that is neither its magic nor a comment or an import."""
    lines = [line.strip() for line in source.splitlines()]
    code_lines = [line for line in lines if line and not line.startswith(("#", "%", "import ", "from "))]
    return (code_lines or lines or [""])[0][:200]
