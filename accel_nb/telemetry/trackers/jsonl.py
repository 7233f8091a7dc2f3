"""A tracker that needs no package: one line of JSON for each call of ``log``."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, TextIO

from accel_nb.runtime.strict_json import name_non_finite
from accel_nb.telemetry.trackers.base import GeneralTracker


class JsonlTracker(GeneralTracker):
    """Appends to ``LOGGING_DIR/RUN.jsonl``: the configuration, then values with step and time.

    A line ``{"resumed": {"step": N}}`` records that training was resumed from a checkpoint of that step.
    """

    name = "jsonl"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str]) -> None:
        """Set the path of the file; `start` opens it."""
        super().__init__()
        self.run_id = run_name
        self.path = Path(logging_dir) / f"{run_name}.jsonl"
        self._resumed_step: int | None = None
        self._file: TextIO | None = None

    @property
    def tracker(self) -> TextIO | None:
        """The open file."""
        return self._file

    def resume(self, run_id: str, step: int) -> None:
        """Record the resume in the file, since the resumed training repeats the steps after ``step``."""
        self._resumed_step = step

    def start(self) -> None:
        """Open the file for appending."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        is_cut = self.path.exists() and self.path.read_bytes()[-1:] not in (b"", b"\n")
        self._file = self.path.open("a", encoding="utf-8")
        if is_cut:  # by the end of a process in a write
            self._file.write("\n")
        if self._resumed_step is not None:
            self._write({"resumed": {"step": self._resumed_step}})

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Write the configuration."""
        self._write({"config": values})

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write one line; NaN and infinities are written as strings."""
        self._write({"step": step, "time": time.time(), "values": values})

    def flush(self) -> None:
        """Write buffered lines to the file."""
        if self._file is not None:
            self._file.flush()

    def finish(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, record: dict[str, Any]) -> None:
        assert self._file is not None, "start comes first"
        self._file.write(json.dumps(name_non_finite(record), default=str, allow_nan=False) + "\n")
