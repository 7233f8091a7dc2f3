"""One run, as it is kept in a folder of its own: ``run.json``, and ``metrics.jsonl`` beside it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

VERSION = 1
RUN = "run.json"
METRICS = "metrics"
"""The file of metrics, without its ending: one JSON object a line; a text among the values is a checkpoint's place."""
MAX_BYTES = 1024 * 1024
MAX_METRICS_BYTES = 64 * 1024 * 1024

Outcome = Literal["running", "done", "failed", "interrupted"]


@dataclass(frozen=True, slots=True)
class Run:
    """What is known of a run; times are seconds since the epoch.

    ``config`` has for each given option its value and where that came from; ``metrics`` the last value of each.
    """

    id: str
    name: str
    kind: Literal["cell", "launch"]
    target: str
    started: float
    args: tuple[str, ...] = ()
    ended: float | None = None
    outcome: Outcome = "running"
    exit_code: int | None = None
    error: str | None = None
    config: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    git: Mapping[str, Any] | None = None
    num_steps: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    checkpoints: tuple[str, ...] = ()

    @property
    def duration_s(self) -> float | None:
        """How long it took; None while it runs."""
        return None if self.ended is None else self.ended - self.started

    def to_json(self) -> str:
        """Return the document that `from_json` reads."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1, default=str)

    @classmethod
    def from_json(cls, text: str) -> Run:
        """Rebuild a run; raises ValueError for anything that `to_json` has not written."""
        try:
            fields = json.loads(text)
            if fields.pop("version") != VERSION:
                raise ValueError("another version")
            for name in ("args", "checkpoints"):
                fields[name] = tuple(str(item) for item in fields[name])
            fields["config"] = {str(name): (value, str(origin)) for name, (value, origin) in fields["config"].items()}
            run = cls(**fields)
            numbers = (run.started, run.ended or 0.0, run.exit_code or 0, run.num_steps or 0)
            is_right = all(isinstance(item, str) for item in (run.id, run.name, run.target, run.kind))
            if not is_right or run.outcome not in get_args(Outcome):
                raise ValueError("fields of wrong types")
            if not all(isinstance(item, int | float) and math.isfinite(item) for item in numbers):
                raise ValueError("numbers of wrong types")
        except (TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"not a run: {error}") from None
        return run


def read_run(folder: Path) -> Run:
    """Return the run in a folder, with the metrics that it has logged so far; raises ValueError and OSError."""
    with open(folder / RUN, encoding="utf-8") as file:
        run = Run.from_json(file.read(MAX_BYTES))
    if run.id != folder.name:
        raise ValueError(f"{folder} holds the run {run.id!a}")
    logged = list(read_metrics(folder))
    if not logged:
        return run
    last = dict(run.metrics)
    checkpoints = list(run.checkpoints)
    for _, values in logged:
        checkpoints += [value for value in values.values() if isinstance(value, str)]
        last |= {name: value for name, value in values.items() if not isinstance(value, str)}
    steps = max((step for step, _ in logged if step is not None), default=None)
    return replace(run, metrics=last, checkpoints=tuple(dict.fromkeys(checkpoints)), num_steps=run.num_steps or steps)


def read_metrics(folder: Path) -> list[tuple[int | None, dict[str, float | str]]]:
    """Return step and values of each line of a run's metrics; lines that are not whole are left out."""
    rows: list[tuple[int | None, dict[str, float | str]]] = []
    try:
        with open(folder / f"{METRICS}.jsonl", encoding="utf-8", errors="replace") as file:
            text = file.read(MAX_METRICS_BYTES)
    except OSError:
        return rows
    for line in text.splitlines():
        try:
            found = json.loads(line)
            values = {str(name): _value(value) for name, value in found["values"].items()}
            step = found["step"]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue
        rows.append((step if isinstance(step, int) else None, values))
    return rows


def _value(value: Any) -> float | str:
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):  # what JSON has no number for
        return float(value)
    return value if isinstance(value, str) else float(value)
