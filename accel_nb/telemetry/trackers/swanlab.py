"""The tracker for SwanLab."""

from __future__ import annotations

import uuid
from importlib import import_module
from typing import Any

from accel_nb.telemetry.trackers.base import GeneralTracker, flatten_names, json_value
from accel_nb.telemetry.trackers.pictures import pictures, squeeze_channel


class SwanlabTracker(GeneralTracker):
    """An experiment of the project that `init_trackers` names; ``mode="offline"`` stores it on the local disk.

    A process can have one experiment at a time. A resumed offline experiment is a second folder with the same id.
    """

    name = "swanlab"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        """Set the project's name, ``run_name``; ``kwargs`` are passed to ``swanlab.init``."""
        super().__init__()
        self.run_id = str(kwargs.pop("id", None) or uuid.uuid4().hex[:21])
        self._options = {"project": run_name, "resume": "allow", **kwargs}
        self._run: Any = None

    @property
    def tracker(self) -> Any:
        """The ``swanlab.Run``."""
        return self._run

    run = tracker  # the name in Hugging Face Accelerate

    def start(self) -> None:
        """Open the experiment."""
        swanlab: Any = import_module("swanlab")
        self._run = swanlab.init(**self._options, id=self.run_id)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Add the configuration to the experiment's."""
        self._run.config.update(json_value(values))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers and strings."""
        swanlab: Any = import_module("swanlab")
        row = {
            name: swanlab.Text(value) if isinstance(value, str) else value
            for name, value in flatten_names(values).items()
        }
        self._run.log(row, step=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log pictures; ``kwargs`` are passed to ``swanlab.Image``."""
        swanlab: Any = import_module("swanlab")
        rows = {
            name: [swanlab.Image(squeeze_channel(item), **kwargs) for item in pictures(value)]
            for name, value in values.items()
        }
        self._run.log(rows, step=step)

    def finish(self) -> None:
        """Close the experiment."""
        self._run.finish()
