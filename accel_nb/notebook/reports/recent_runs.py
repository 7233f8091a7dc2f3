"""The newest recorded runs for the sidebar, with strings and lists limited: the files may contain anything."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from accel_nb.config import OPTIONS, Layer, parse_flags, resolve
from accel_nb.config.flags import flags_to_line, value_text
from accel_nb.errors import ConfigError
from accel_nb.runs import Run, RunRegistry
from accel_nb.runs.comparison import comparable_facts, differing_facts
from accel_nb.runs.record import read_metrics, read_run
from accel_nb.runtime.process.secrets import HIDDEN
from accel_nb.ui.series_table import Table

MAX_RUNS = 50
MAX_COMPARED = 8
MAX_POINTS = 60
MAX_LISTED = 64
"""How many options and metrics of one run are sent."""
MAX_CHECKPOINTS = 4
MAX_TEXT = 256
MAX_ERROR = 2000


def recent_runs_version() -> str:
    """Return a text that changes when the result of `list_recent_runs` may have changed; empty without runs."""
    return RunRegistry().fingerprint(MAX_RUNS)


def list_recent_runs(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the newest runs and those with a star, each with its last loss and the points of a small chart."""
    registry = RunRegistry()
    ids = registry.recent_ids(MAX_RUNS)[: 2 * MAX_RUNS]
    return {"runs": [_summary(registry, run) for run in registry.runs(ids=ids, sampled=True)]}


def describe_run(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the details of the run with the given ``id``. Raise ValueError if there is none."""
    run = _read(arguments.get("id"))
    packages = run.environment.get("packages")
    return {
        "id": run.id,
        "target": _text(" ".join([run.target, *run.args])),
        "error": "\n".join(_text(line) for line in (run.error or "")[:MAX_ERROR].splitlines()),
        "code": _text(run.code or ""),
        "folder": _text(run.environment.get("folder", "")),
        "machine": _text(run.environment.get("machine", "")),
        "packages": _text(", ".join(f"{name} {item}" for name, item in _items(packages))),
        "num_checkpoints": len(run.checkpoints),
        "checkpoints": [_text(url) for url in run.checkpoints[-MAX_CHECKPOINTS:]],
        "metrics": [{"name": _text(name), "value": _finite(value)} for name, value in _items(run.metrics)],
        "options": [
            {"option": _text(name), "value": _text(value_text(value)), "source": _text(origin)}
            for name, (value, origin) in _items(run.config)
        ],
        "line": flags_of_run(run),
        "notebook": _text(run.notebook or ""),
        "recorded_name": _text(run.name),
        "notes": run.labels.notes,
    }


def label_run(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Set the given ``labels`` of the run ``id``: name, notes, tags, star. Raise ValueError if they are not allowed."""
    labels = arguments.get("labels")
    if not isinstance(labels, dict):
        raise ValueError("labels are an object")
    return {"id": RunRegistry().set_labels(_read(arguments.get("id")), labels).id}


def compare_runs(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts in which the runs with the given ``ids`` differ, with the value of each run or null."""
    ids = arguments.get("ids")
    if not isinstance(ids, list) or not 2 <= len(ids) <= MAX_COMPARED:
        raise ValueError(f"2 to {MAX_COMPARED} runs can be compared")
    differing = differing_facts([comparable_facts(_read(run_id)) for run_id in ids])
    rows = [
        {"name": _text(name), "values": [None if value is None else _text(value) for value in values]}
        for name, values in list(differing.items())[:MAX_LISTED]
    ]
    return {"ids": ids, "rows": rows}


def flags_of_run(run: Run) -> str | None:
    """Return the flags that reproduce a run's options, or None if they cannot be expressed as flags.

    Values with secrets are left out, and so is the options file, whose values are included.
    """
    values = {
        name: value
        for name, (value, _) in run.config.items()
        if name in OPTIONS and name != "config" and HIDDEN not in str(value)
    }
    try:
        line = flags_to_line(Layer("flags", values, f"run {run.id}"))
        resolve([parse_flags(line)])
    except (ConfigError, ValueError, KeyError):
        return None
    return line


def _read(run_id: object) -> Run:
    registry = RunRegistry()
    if run_id not in registry.ids():
        raise ValueError("this run is no longer recorded")
    try:
        return read_run(registry.folder / str(run_id), sampled=True)
    except (OSError, ValueError):
        raise ValueError("this run can no longer be read") from None


def _summary(registry: RunRegistry, run: Run) -> dict[str, Any]:
    name, table = _curve(registry, run)
    points = table.downsampled(MAX_POINTS)
    return {
        "id": run.id,
        "name": _text(run.title),
        "tags": [_text(tag) for tag in run.labels.tags],
        "starred": run.labels.is_starred,
        "notebook": _text(run.notebook or ""),
        "kind": _text(run.kind),
        "outcome": run.outcome,
        "started": run.started,
        "duration_s": _finite(run.duration_s),
        "num_steps": run.num_steps,
        "metric": _text(name),
        "value": _finite(run.metrics.get(name)),
        "steps": points[0].tolist(),
        "values": points[1].tolist(),
    }


def _curve(registry: RunRegistry, run: Run) -> tuple[str, Table]:
    """Return the name and the finite values of the metric to draw: the loss, or the one that was logged first."""
    names = [name for name in run.metrics if name]
    name = next((name for name in sorted(names, key=len) if "loss" in name.lower()), names[0] if names else "")
    table, last = Table(2), -math.inf
    for step, values in read_metrics(registry.folder / run.id, sampled=True):
        value = values.get(name)
        if step is not None and isinstance(value, float) and math.isfinite(value):
            last = max(last, _clamp_step(step))
            table.append((last, value))
    return name, table


def _clamp_step(step: int) -> float:
    return float(max(0, min(step, 2**53)))


def _items(found: Any) -> list[tuple[Any, Any]]:
    return list(found.items())[:MAX_LISTED] if isinstance(found, dict) else []


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _text(value: object) -> str:
    """Return a printable text of at most `MAX_TEXT` characters."""
    text = str(value)[: MAX_TEXT + 1]
    text = "".join(char if char.isprintable() else "\ufffd" for char in text)
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"
