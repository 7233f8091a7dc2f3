"""The tracker for Aim."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

from accel_nb.telemetry.trackers.base import GeneralTracker, flatten_names, json_value
from accel_nb.telemetry.trackers.pictures import pictures, squeeze_channel


class AimTracker(GeneralTracker):
    """A run of the experiment that `init_trackers` names, in the repository ``LOGGING_DIR``.

    Aim assigns the run's hash when it is opened; later checkpoints store it.
    """

    name = "aim"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] = ".", **kwargs: Any) -> None:
        """Set the experiment, ``run_name``; ``kwargs`` go to ``aim.Run``. Automatic recording is off by default."""
        super().__init__()
        self.run_id = kwargs.pop("run_hash", None)
        self._options = {
            "repo": os.fspath(logging_dir),
            "experiment": run_name,
            "system_tracking_interval": None,
            "capture_terminal_logs": False,
            **kwargs,
        }
        self._run: Any = None

    @property
    def tracker(self) -> Any:
        """The ``aim.Run``."""
        return self._run

    writer = tracker  # the name in Hugging Face Accelerate

    def start(self) -> None:
        """Open the run."""
        aim: Any = import_module("aim")
        repo = self._options["repo"]
        if isinstance(repo, str) and "://" not in repo:
            Path(repo).mkdir(parents=True, exist_ok=True)
        # The lock of a run remains if its process was killed; force_resume overrides it.
        self._run = aim.Run(**{"force_resume": self.run_id is not None, **self._options}, run_hash=self.run_id)
        self.run_id = self._run.hash

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration as ``hparams``."""
        self._run["hparams"] = json_value(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Track numbers and strings; ``kwargs`` are passed to ``Run.track``."""
        aim: Any = import_module("aim")
        for name, value in flatten_names(values).items():
            self._run.track(aim.Text(value) if isinstance(value, str) else value, name=name, step=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Track pictures; ``kwargs`` are passed to ``aim.Image``."""
        aim: Any = import_module("aim")
        for name, value in values.items():
            self._run.track(
                [aim.Image(squeeze_channel(item), **kwargs) for item in pictures(value)], name=name, step=step
            )

    def finish(self) -> None:
        """Close the run."""
        self._run.close()
