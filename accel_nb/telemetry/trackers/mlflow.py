"""MLflow, through its client: no active run is set in the process, so runs of other code are not affected."""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from accel_nb.telemetry.trackers.base import GeneralTracker, flatten_names
from accel_nb.telemetry.trackers.pictures import numbered, pictures

_MARK = "accel_nb.run"
_MAX_METRICS = 1000
"""Maximum number of metrics in one request."""
_MAX_PARAMS = 100
_REFUSED = re.compile(r"[^/\w.\- ]")


class MlflowTracker(GeneralTracker):
    """A run of the experiment that `init_trackers` names, at ``tracking_uri`` or at MLflow's default URI."""

    name = "mlflow"

    def __init__(
        self,
        run_name: str,
        tracking_uri: str | None = None,
        experiment_name: str | None = None,
        artifact_location: str | None = None,
        tags: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Set the experiment's name; ``artifact_location`` is used if the experiment is new.

        ``kwargs`` are passed to ``MlflowClient.create_run``. A tag identifies the run when training is resumed.
        """
        super().__init__()
        self.run_id = uuid.uuid4().hex[:12]
        self._uri, self._experiment, self._artifacts = tracking_uri, experiment_name or run_name, artifact_location
        self._tags, self._options = tags or {}, kwargs
        self._client: Any = None
        self._run: Any = None
        self._waiting: list[Any] = []

    @property
    def tracker(self) -> Any:
        """The run as MLflow's client returns it: ``mlflow.entities.Run``."""
        return self._run

    active_run = tracker  # the name in Hugging Face Accelerate

    def start(self) -> None:
        """Open the run."""
        self._client = client = import_module("mlflow").MlflowClient(self._uri)
        existing = client.get_experiment_by_name(self._experiment)
        if existing is None:
            experiment = client.create_experiment(self._experiment, artifact_location=self._artifacts)
        else:
            experiment = existing.experiment_id
        runs = client.search_runs([experiment], f"tags.`{_MARK}` = '{self.run_id}'", max_results=1)
        if runs:
            self._run = runs[0]
            client.update_run(self._run.info.run_id, status="RUNNING")
        else:
            tags = {**self._tags, _MARK: self.run_id}
            self._run = client.create_run(experiment, tags=tags, **self._options)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store parameters as texts of at most 6,000 characters; those that a resumed run has are not changed."""
        param: Any = import_module("mlflow.entities").Param
        stored = self._client.get_run(self._id).data.params
        params = [param(name, str(value)[:6000]) for name, value in _flatten(values).items() if name not in stored]
        for begin in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(self._id, params=params[begin : begin + _MAX_PARAMS])

    def log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        """Log numbers as metrics and texts as tags."""
        metric: Any = import_module("mlflow.entities").Metric
        now = int(time.time() * 1000)
        for name, value in _flatten(values).items():
            if isinstance(value, str):
                self._client.set_tag(self._id, name, value)
            else:
                number = int(value) if isinstance(value, bool) else value
                self._waiting.append(metric(name, number, now, step or 0))
        if len(self._waiting) >= _MAX_METRICS // 2:
            self.flush()

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log pictures as PNG files ``images/NAME_STEP.png``."""
        for name, value in values.items():
            for key, item in numbered(name, pictures(value)).items():
                self._client.log_image(self._id, item, artifact_file=f"images/{_file_name(key)}_{step or 0}.png")

    def log_table(
        self, table_name: str, columns: Sequence[str], data: Sequence[Sequence[Any]], step: int | None = None
    ) -> None:
        """Log the table as ``tables/NAME_STEP.json``."""
        table = {"columns": list(columns), "data": [list(row) for row in data]}
        self._client.log_dict(self._id, table, f"tables/{_file_name(table_name)}_{step or 0}.json")

    def log_artifact(self, local_path: str, name: str | None = None) -> None:
        """Log a file or folder; ``name`` is the destination folder among the run's artifacts."""
        log = self._client.log_artifacts if os.path.isdir(local_path) else self._client.log_artifact
        log(self._id, local_path, name)

    def log_figure(self, figure: Any, artifact_file: str, **kwargs: Any) -> None:
        """Log a figure of matplotlib or plotly as a file; ``kwargs`` are passed to ``MlflowClient.log_figure``."""
        self._client.log_figure(self._id, figure, artifact_file, **kwargs)

    def flush(self) -> None:
        """Send buffered metrics."""
        while self._waiting:
            self._client.log_batch(self._id, metrics=self._waiting[:_MAX_METRICS])
            del self._waiting[:_MAX_METRICS]

    def finish(self) -> None:
        """Close the run."""
        self._client.set_terminated(self._id)

    @property
    def _id(self) -> str:
        return self._run.info.run_id


def _flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return flat values; characters that MLflow refuses in names are replaced by ``_``."""
    return {_REFUSED.sub("_", name): value for name, value in flatten_names(values).items()}


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in name)
