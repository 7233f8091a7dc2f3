"""One run, stored in its own folder as ``run.json`` and ``metrics.jsonl``, with the user's ``labels.json``."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

from accel_nb.runs.labels import LABELS, RunLabels

VERSION = 1
RUN = "run.json"
METRICS = "metrics"
"""The file of metrics, without its suffix: one JSON object a line; text values are URLs of checkpoints."""
MAX_BYTES = 1024 * 1024
MAX_METRICS_BYTES = 64 * 1024 * 1024
_NUM_SAMPLES, _SAMPLE_BYTES = 32, 4096

_NAMED_NUMBERS = ("nan", "inf", "-inf")
"""Values that JSON has no number for."""

Outcome = Literal["running", "done", "failed", "interrupted"]


@dataclass(frozen=True, slots=True)
class Run:
    """The record of a run; times are seconds since the epoch.

    ``config`` maps each given option to its value and origin, ``metrics`` each name to the last value. ``notebook`` is
    the path of the notebook, if its front end reports it.
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
    notebook: str | None = None
    labels: RunLabels = field(default_factory=RunLabels)

    @property
    def title(self) -> str:
        """The name that the user gave the run, else the recorded one."""
        return self.labels.name or self.name

    @property
    def duration_s(self) -> float | None:
        """The duration; None while it runs."""
        return None if self.ended is None else self.ended - self.started

    @property
    def code(self) -> str | None:
        """The state of the code as text; None if it is unknown."""
        if self.git is None:
            return None
        changed = self.git.get("num_changed")
        words = f"{str(self.git.get('commit'))[:12]} on {self.git.get('branch')}"
        return f"{words}, {changed} changed" if changed else words

    def to_json(self) -> str:
        """Return the document that `from_json` reads, without the labels, which have their own file."""
        document = {"version": VERSION, **asdict(self)}
        del document["labels"]
        return json.dumps(document, indent=1, default=str)

    @classmethod
    def from_json(cls, text: str) -> Run:
        """Rebuild a run; raises ValueError for other documents."""
        try:
            fields = json.loads(text)
            if fields.pop("version") != VERSION:
                raise ValueError("another version")
            if "labels" in fields:
                raise ValueError("labels in the record")
            for name in ("args", "checkpoints"):
                fields[name] = tuple(str(item) for item in fields[name])
            fields["config"] = {str(name): (value, str(origin)) for name, (value, origin) in fields["config"].items()}
            fields["metrics"] = {str(name): _number(value) for name, value in fields["metrics"].items()}
            run = cls(**fields)
            numbers = (run.started, run.ended or 0.0, run.exit_code or 0, run.num_steps or 0)
            optional = [text for text in (run.error, run.notebook) if text is not None]
            texts = (run.id, run.name, run.target, run.kind, *optional)
            tables = (run.environment, {} if run.git is None else run.git)
            if not all(isinstance(item, str) for item in texts) or run.outcome not in get_args(Outcome):
                raise ValueError("fields of wrong types")
            if not all(isinstance(item, dict) for item in tables):
                raise ValueError("tables of wrong types")
            if not all(isinstance(item, int | float) and math.isfinite(item) for item in numbers):
                raise ValueError("numbers of wrong types")
        except (TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
            raise ValueError(f"not a run: {error}") from None
        return run


def read_run(folder: Path, *, sampled: bool = False) -> Run:
    """Return the run in a folder, with the metrics that it has logged so far; raises ValueError and OSError.

    ``sampled`` reads no more than 128 KiB of the metrics, as `read_metrics` does.
    """
    run = Run.from_json(_read_text(folder / RUN, MAX_BYTES))
    if run.id != folder.name:
        raise ValueError(f"{folder} holds the run {run.id!a}")
    run = replace(run, labels=read_labels(folder))
    logged = read_metrics(folder, sampled=sampled)
    if not logged:
        return run
    last = dict(run.metrics)
    checkpoints = list(run.checkpoints)
    for _, values in logged:
        checkpoints += [value for value in values.values() if isinstance(value, str)]
        last |= {name: value for name, value in values.items() if not isinstance(value, str)}
    steps = max((step for step, _ in logged if step is not None), default=None)
    return replace(run, metrics=last, checkpoints=tuple(dict.fromkeys(checkpoints)), num_steps=run.num_steps or steps)


def read_labels(folder: Path) -> RunLabels:
    """Return the user's labels of the run in a folder; empty ones if the file is missing or damaged."""
    try:
        return RunLabels.from_json(_read_text(folder / LABELS, MAX_BYTES))
    except (OSError, ValueError):
        return RunLabels()


def read_metrics(folder: Path, *, sampled: bool = False) -> list[tuple[int | None, dict[str, float | str]]]:
    """Return step and values of each line of a run's metrics; incomplete lines are left out.

    ``sampled`` reads only evenly spaced parts of a long file, the first and the last lines included.
    """
    rows: list[tuple[int | None, dict[str, float | str]]] = []
    path = folder / f"{METRICS}.jsonl"
    try:
        text = _sampled_text(path) if sampled else _read_text(path, MAX_METRICS_BYTES)
    except OSError:
        return rows
    for line in text.splitlines():
        try:
            found = json.loads(line)
            values = {str(name): _value(value) for name, value in found["values"].items()}
            step = found["step"]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
            continue
        rows.append((step if isinstance(step, int) else None, values))
    return rows


def _value(value: Any) -> float | str:
    return value if isinstance(value, str) and value not in _NAMED_NUMBERS else _number(value)


def _number(value: Any) -> float:
    if isinstance(value, str) and value not in _NAMED_NUMBERS:
        raise ValueError("a text for a number")
    return float(value)


def _read_text(path: Path, limit: int) -> str:
    with _open_file(path) as file:
        return file.read(limit).decode("utf-8", "replace")


def _sampled_text(path: Path) -> str:
    """Return at most `_NUM_SAMPLES` parts of a file, each without incomplete lines."""
    with _open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= _NUM_SAMPLES * _SAMPLE_BYTES:
            return file.read(size).decode("utf-8", "replace")
        pieces: list[bytes] = []
        for index in range(_NUM_SAMPLES):
            start = index * (size - _SAMPLE_BYTES) // (_NUM_SAMPLES - 1)
            file.seek(start)
            lines = file.read(_SAMPLE_BYTES).split(b"\n")
            pieces += lines[1 if start else 0 : -1]
        return b"\n".join(pieces).decode("utf-8", "replace")


def _open_file(path: Path) -> BinaryIO:
    """Open a regular file; raises OSError for a pipe or a device, which may block for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a plain file")
    return open(descriptor, "rb")
