"""The tracker for Weights & Biases."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from accel_nb.telemetry.trackers.base import GeneralTracker, UnsupportedByTracker, flatten_names
from accel_nb.telemetry.trackers.pictures import pictures


class WandbTracker(GeneralTracker):
    """A run of the project that `init_trackers` names.

    ``mode="offline"`` or ``WANDB_MODE=offline`` stores it on the local disk.
    """

    name = "wandb"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        """Set the project's name, ``run_name``; ``kwargs`` go to ``wandb.init``. Printed output is not recorded."""
        super().__init__()
        self.run_id = str(kwargs.pop("id", None) or uuid.uuid4().hex[:12])
        self._options = {"project": run_name, "resume": "allow", **kwargs}
        self._run: Any = None

    @property
    def tracker(self) -> Any:
        """The ``wandb.Run``."""
        return self._run

    run = tracker  # the name in Hugging Face Accelerate

    def start(self) -> None:
        """Open the run."""
        wandb: Any = import_module("wandb")
        settings = wandb.Settings(console="off", silent=True)
        self._run = wandb.init(**{"settings": settings, "reinit": "create_new", **self._options, "id": self.run_id})

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Add the values to the run's configuration."""
        self._run.config.update(values, allow_val_change=True)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log one row, nested values as ``outer/inner``; ``kwargs`` are passed to ``Run.log``."""
        self._check_step(step)
        self._run.log(flatten_names(values), step=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log pictures; ``kwargs`` are passed to ``wandb.Image``."""
        self._check_step(step)
        wandb: Any = import_module("wandb")
        rows = {name: [wandb.Image(item, **kwargs) for item in pictures(value)] for name, value in values.items()}
        self._run.log(rows, step=step)

    def log_table(
        self,
        table_name: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        step: int | None = None,
        *,
        dataframe: Any = None,
        **kwargs: Any,
    ) -> None:
        """Log a ``wandb.Table`` of rows or of a data frame; ``kwargs`` are passed to ``Run.log``."""
        self._check_step(step)
        wandb: Any = import_module("wandb")
        names, rows = None if columns is None else list(columns), None if data is None else [list(row) for row in data]
        self._run.log({table_name: wandb.Table(columns=names, data=rows, dataframe=dataframe)}, step=step, **kwargs)

    def log_artifact(self, local_path: str, name: str | None = None) -> None:
        """Log a file or folder as an artifact of the type ``file``."""
        wandb: Any = import_module("wandb")
        artifact = wandb.Artifact(name or os.path.basename(os.path.abspath(local_path)), type="file")
        (artifact.add_dir if os.path.isdir(local_path) else artifact.add_file)(local_path)
        self._run.log_artifact(artifact)

    def finish(self) -> None:
        """Close the run."""
        self._run.finish()

    def _check_step(self, step: int | None) -> None:
        """Raise `UnsupportedByTracker` for a step before the latest: the backend would drop its values."""
        if step is not None and step < self._run.step:
            raise UnsupportedByTracker(f"tracker {self.name} does not support values of steps before the latest")
