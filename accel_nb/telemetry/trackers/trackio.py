"""The tracker for Trackio."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from accel_nb.telemetry.trackers.base import GeneralTracker, flatten_names, json_value
from accel_nb.telemetry.trackers.pictures import numbered, pictures, squeeze_channel


class TrackioTracker(GeneralTracker):
    """A run of the project that `init_trackers` names, in the folder ``TRACKIO_DIR``.

    The dashboard is not opened, since that would start a server in this process: run ``trackio show`` in a shell.
    """

    name = "trackio"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        """Set the project's name, ``run_name``; ``kwargs`` are passed to ``trackio.init``."""
        super().__init__()
        self.run_id = str(kwargs.pop("name", None) or f"run-{uuid.uuid4().hex[:12]}")
        self._options = {
            "project": run_name,
            "resume": "allow",
            "embed": False,
            "auto_log_gpu": False,
            "auto_log_cpu": False,
            **kwargs,
        }
        self._run: Any = None

    @property
    def tracker(self) -> Any:
        """The ``trackio.Run``."""
        return self._run

    run = tracker  # the name in Hugging Face Accelerate

    def start(self) -> None:
        """Open the run."""
        trackio: Any = import_module("trackio")
        self._run = trackio.init(**self._options, name=self.run_id)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Add the values to the run's configuration, which is stored with the first row."""
        self._run.config.update(json_value(values))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers and strings as one row."""
        self._run.log(flatten_names(values), step=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log pictures; ``kwargs`` are passed to ``trackio.Image``."""
        trackio: Any = import_module("trackio")
        rows = {
            key: trackio.Image(squeeze_channel(item), **kwargs)
            for name, value in values.items()
            for key, item in numbered(name, pictures(value)).items()
        }
        self._run.log(rows, step=step)

    def log_table(
        self, table_name: str, columns: Sequence[str], data: Sequence[Sequence[Any]], step: int | None = None
    ) -> None:
        """Log a ``trackio.Table``."""
        trackio: Any = import_module("trackio")
        table = trackio.Table(columns=list(columns), data=[list(row) for row in data])
        self._run.log({table_name: table}, step=step)

    def log_artifact(self, local_path: str, name: str | None = None) -> None:
        """Log a file or folder as an artifact of the type ``file``."""
        self._run.log_artifact(local_path, name=name or os.path.basename(os.path.abspath(local_path)), type="file")

    def finish(self) -> None:
        """Close the run."""
        self._run.finish()
