"""The tracker for Comet."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from accel_nb.telemetry.trackers.base import GeneralTracker, flatten_names
from accel_nb.telemetry.trackers.pictures import numbered, pictures, squeeze_channel


class CometTracker(GeneralTracker):
    """An experiment of the project that `init_trackers` names; ``online=False`` stores it on the local disk."""

    name = "comet_ml"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        """Set the project's name, ``run_name``; ``kwargs`` are passed to ``comet_ml.start``.

        Without an ``experiment_config``, only the run's values are logged: no code, no output, and PyTorch is not
        instrumented.
        """
        super().__init__()
        self.run_id = str(kwargs.pop("experiment_key", None) or uuid.uuid4().hex)
        self._options = {"project_name": run_name, **kwargs}
        self._resumes = False
        self._experiment: Any = None

    @property
    def tracker(self) -> Any:
        """The experiment."""
        return self._experiment

    writer = tracker  # the name in Hugging Face Accelerate

    def resume(self, run_id: str, step: int) -> None:
        """Continue an experiment."""
        self.run_id, self._resumes = run_id, True

    def start(self) -> None:
        """Open the experiment."""
        comet_ml: Any = import_module("comet_ml")
        quiet = comet_ml.ExperimentConfig(
            log_code=False,
            log_graph=False,
            parse_args=False,
            log_git_metadata=False,
            log_git_patch=False,
            log_env_details=False,
            auto_output_logging=False,
            auto_param_logging=False,
            auto_metric_logging=False,
            auto_log_co2=False,
            display_summary_level=0,
        )
        mode = "get" if self._resumes else "create"
        options = {"experiment_config": quiet, "mode": mode, **self._options}
        self._experiment = comet_ml.start(**options, experiment_key=self.run_id)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log the configuration as parameters."""
        self._experiment.log_parameters(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as metrics and strings as other values; ``kwargs`` are passed to ``log_metrics``."""
        numbers = {name: value for name, value in flatten_names(values).items() if not isinstance(value, str)}
        self._experiment.log_metrics(numbers, step=step, **kwargs)
        for name, value in values.items():
            if isinstance(value, str):
                self._experiment.log_other(name, value)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log pictures; ``kwargs`` are passed to ``log_image``."""
        for name, value in values.items():
            for key, item in numbered(name, pictures(value)).items():
                self._experiment.log_image(squeeze_channel(item), name=key, step=step, **kwargs)

    def log_table(
        self, table_name: str, columns: Sequence[str], data: Sequence[Sequence[Any]], step: int | None = None
    ) -> None:
        """Log the table as ``NAME.csv``."""
        self._experiment.log_table(f"{table_name}.csv", [list(row) for row in data], headers=list(columns))

    def log_artifact(self, local_path: str, name: str | None = None) -> None:
        """Log a file or folder as assets."""
        if os.path.isdir(local_path):
            self._experiment.log_asset_folder(local_path, log_file_name=True, recursive=True)
        else:
            self._experiment.log_asset(local_path, file_name=name)

    def finish(self) -> None:
        """Close the experiment."""
        self._experiment.end()
