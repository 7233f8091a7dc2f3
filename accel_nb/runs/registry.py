"""The registry of runs, a folder: start, end and find runs. A run that cannot be recorded continues unrecorded."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from accel_nb.config import Resolved
from accel_nb.errors import ConfigError
from accel_nb.runs.facts import GIT_TIMEOUT_S, environment_facts, git_facts
from accel_nb.runs.labels import LABELS
from accel_nb.runs.record import METRICS, RUN, Outcome, Run, read_labels, read_run
from accel_nb.runtime.process.environment import get_variable
from accel_nb.runtime.process.secrets import redact_command_line, redacted

logger = logging.getLogger(__name__)

MAX_RUNS = 500
"""How many of the newest runs are kept; older ones without a star are deleted."""
_ID = re.compile(r"[0-9]{8}-[0-9]{6}-[0-9a-f]{6}")


def default_folder() -> Path:
    """Return the folder in which runs are recorded, below ``XDG_STATE_HOME``."""
    state = get_variable("XDG_STATE_HOME", "") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return Path(state) / "accel_nb" / "runs"


@dataclass(slots=True)
class RunRecording:
    """A run that is being recorded; ``folder`` is None if nothing could be written."""

    run: Run
    folder: Path | None

    def finish(self, outcome: Outcome, **facts: Any) -> None:
        """Record how the run ended, with further fields of `Run`."""
        self.run = replace(self.run, ended=time.time(), outcome=outcome, **facts)
        if self.folder is not None:
            try:
                _write(self.folder / RUN, _to_document(self.run))
            except OSError as error:
                logger.warning("the end of run %s is not recorded: %s", self.run.id, error)

    def log(self, rows: Iterable[tuple[int, Mapping[str, float | str]]]) -> None:
        """Record values at steps; NaN and infinities are passed as strings."""
        if self.folder is None:
            return
        lines = (json.dumps({"step": step, "values": values}, allow_nan=False) for step, values in rows)
        try:
            with open(self.folder / f"{METRICS}.jsonl", "a", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in lines)
        except OSError as error:
            logger.warning("the metrics of run %s are not recorded: %s", self.run.id, error)


class RunRegistry:
    """The runs in a folder."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = default_folder() if folder is None else folder

    def begin(
        self,
        kind: Literal["cell", "launch"],
        target: str,
        resolved: Resolved,
        *,
        name: str | None = None,
        args: Sequence[str] = (),
        notebook: str | None = None,
        started: float | None = None,
        git_timeout_s: float = GIT_TIMEOUT_S,
    ) -> RunRecording:
        """Record the start of a run. If the folder cannot be written, a warning is logged and nothing is recorded."""
        now = time.time() if started is None else started
        run = Run(
            id=time.strftime("%Y%m%d-%H%M%S", time.localtime(now)) + f"-{secrets.token_hex(3)}",
            name=resolved.config.name or name or Path(target).stem,
            kind=kind,
            target=target,
            started=now,
            args=tuple(args),
            notebook=notebook,
            config=_options_with_origins(resolved),
            environment=environment_facts(),
            git=git_facts(git_timeout_s),
        )
        folder = self.folder / run.id
        try:
            folder.mkdir(parents=True, mode=0o700)
            _write(folder / RUN, _to_document(run))
        except OSError as error:
            logger.warning("runs are not recorded: %s: %s", self.folder, error.strerror)
            return RunRecording(run, None)
        self._prune()
        return RunRecording(run, folder)

    def ids(self) -> list[str]:
        """Return the ids of all runs, newest first."""
        try:
            names = os.listdir(self.folder)
        except OSError:
            return []
        return sorted((name for name in names if _ID.fullmatch(name)), reverse=True)

    def recent_ids(self, limit: int) -> list[str]:
        """Return the ids of the newest ``limit`` runs and of all earlier ones with a star, newest first."""
        ids = self.ids()
        return ids[:limit] + [name for name in ids[limit:] if read_labels(self.folder / name).is_starred]

    def runs(self, limit: int | None = None, *, ids: Sequence[str] | None = None, sampled: bool = False) -> list[Run]:
        """Return the runs that can be read, newest first, or those with the given ids.

        ``sampled`` reads long metrics as `read_run` does.
        """
        found: list[Run] = []
        for name in self.ids() if ids is None else ids:
            if len(found) == limit:
                break
            with suppress(OSError, ValueError):
                found.append(read_run(self.folder / name, sampled=sampled))
        return found

    def fingerprint(self, limit: int) -> str:
        """Return a fingerprint of `recent_ids`, which changes when a run begins, ends or is labeled."""
        parts: list[str] = []
        for name in self.recent_ids(limit):
            for file in (RUN, LABELS):
                with suppress(OSError):
                    parts.append(f"{name} {os.stat(self.folder / name / file).st_mtime_ns}")
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16] if parts else ""

    def find(self, name_or_id: str) -> Run:
        """Return a run by its id, the beginning or end of its id, or its name; of several with that name the newest.

        ``last`` is the newest run. Raises ConfigError if no run matches, or if several ids do.
        """
        ids = self.ids()
        matches = [
            name for name in ids if name == name_or_id or name.startswith(name_or_id) or name.endswith(f"-{name_or_id}")
        ]
        if name_or_id == "last":
            matches = ids[:1]
        if len(matches) > 1:
            raise ConfigError(f"{name_or_id!a} matches {len(matches)} runs; write more of the id")
        if matches:
            try:
                return read_run(self.folder / matches[0])
            except (OSError, ValueError) as error:
                raise ConfigError(f"run {matches[0]} cannot be read: {error}; remove its folder") from None
        for run in self.runs():
            if name_or_id in (run.title, run.name):
                return run
        raise ConfigError(f"there is no run {name_or_id!a} in {self.folder}; accel-nb runs list shows them")

    def set_labels(self, run: Run, values: Mapping[str, Any]) -> Run:
        """Replace the given fields of a run's labels, and return the run with them.

        Raises ConfigError for wrong values and if they cannot be written; nothing is changed then.
        """
        folder = self.folder / run.id
        labels = read_labels(folder).changed(values)
        try:
            _write(folder / LABELS, labels.to_json())
        except OSError as error:
            raise ConfigError(f"the labels of run {run.id} cannot be written: {error}") from None
        return replace(run, labels=labels)

    def _prune(self) -> None:
        """Delete the oldest runs over the limit, except those with a star."""
        for name in self.ids()[MAX_RUNS:]:
            if not read_labels(self.folder / name).is_starred:
                shutil.rmtree(self.folder / name, ignore_errors=True)


def _options_with_origins(resolved: Resolved) -> Mapping[str, tuple[Any, str]]:
    rows = {row.option: row for row in resolved.explain()}
    return {name: (value, str(rows[name].origin)) for name, value in resolved.given.items()}


def _to_document(run: Run) -> str:
    """Return the document of a run, without secrets."""
    names = ("name", "target", "error", "config", "git", "checkpoints", "notebook")
    fields = {name: redacted(getattr(run, name)) for name in names}
    return replace(run, args=redact_command_line(run.args), **fields).to_json()


def _write(path: Path, text: str) -> None:
    """Write a file atomically."""
    temporary = path.with_name(f".{path.name}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(temporary, path)
