"""MLflow, through its client: no active run is set in the process, so runs of other code are not affected."""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from accel_nb.runtime.process.environment import get_variables
from accel_nb.telemetry.trackers.base import GeneralTracker, flatten_names
from accel_nb.telemetry.trackers.pictures import numbered, pictures

_MARK = "accel_nb.run"
_MAX_METRICS = 1000
"""Maximum number of metrics in one request."""
_MAX_PARAMS = 100
_MAX_TAG = 5000
"""Maximum length of a tag in characters; a longer one is refused."""
_REFUSED = re.compile(r"[^/\w.\- ]")


class MlflowTracker(GeneralTracker):
    """A run of the experiment that `init_trackers` names, at ``tracking_uri`` or at MLflow's default URI."""

    name = "mlflow"
    name_argument = "experiment_name"

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        tags: Mapping[str, Any] | str | None = None,
        nested_run: bool = False,
        run_name: str | None = None,
        description: str | None = None,
        *,
        tracking_uri: str | None = None,
        artifact_location: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Set the experiment's name, and how its run is opened.

        Args:
            experiment_name: An experiment, which is created if there is none of that name.
            logging_dir: Another name of ``artifact_location``, as in Hugging Face Accelerate.
            run_id: A run to continue, in place of a new one.
            tags: Tags of the run, as a dictionary or as its JSON.
            nested_run: Whether the run belongs to the active run of ``mlflow.start_run``, if there is one.
            run_name: The name of a new run.
            description: The text that the run is shown with.
            tracking_uri: Where runs are stored; by default MLflow's own setting.
            artifact_location: Where the artifacts of a new experiment are stored.
            kwargs: Passed to ``MlflowClient.create_run``.

        The variables ``MLFLOW_EXPERIMENT_NAME``, ``MLFLOW_RUN_ID`` and ``MLFLOW_TAGS`` have priority. A tag identifies
        the run when training is resumed.
        """
        super().__init__()
        self.run_id = uuid.uuid4().hex[:12]
        names = ("MLFLOW_EXPERIMENT_NAME", "MLFLOW_RUN_ID", "MLFLOW_TAGS")
        variables = get_variables(*names)
        experiment, self._continued, tags = (
            variables.get(name, value) for name, value in zip(names, (experiment_name, run_id, tags), strict=True)
        )
        location = artifact_location or logging_dir
        self._uri, self._experiment = tracking_uri, experiment or "Default"
        self._artifacts = None if location is None else os.fspath(location)
        self._tags: dict[str, Any] = dict(json.loads(tags) if isinstance(tags, str) else tags or {})
        if description is not None:
            self._tags["mlflow.note.content"] = description
        if nested_run and (parent := import_module("mlflow").active_run()) is not None:
            # Read here, since MLflow's active run is that of the calling thread.
            self._tags["mlflow.parentRunId"] = parent.info.run_id
        self._options = kwargs if run_name is None else {"run_name": run_name, **kwargs}
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
        tags = {**self._tags, _MARK: self.run_id}
        if self._continued is not None:
            runs = [client.get_run(self._continued)]
        else:
            existing = client.get_experiment_by_name(self._experiment)
            if existing is None:
                experiment = client.create_experiment(self._experiment, artifact_location=self._artifacts)
            else:
                experiment = existing.experiment_id
            runs = client.search_runs([experiment], f"tags.`{_MARK}` = '{self.run_id}'", max_results=1)
            if not runs:
                self._run = client.create_run(experiment, tags=tags, **self._options)
                return
        self._run = runs[0]
        client.update_run(self._id, status="RUNNING")
        for name, value in tags.items():
            client.set_tag(self._id, name, value)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store parameters as strings of at most 6,000 characters; those that a resumed run has are not changed."""
        param: Any = import_module("mlflow.entities").Param
        stored = self._client.get_run(self._id).data.params
        params = [param(name, str(value)[:6000]) for name, value in _flatten(values).items() if name not in stored]
        for begin in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(self._id, params=params[begin : begin + _MAX_PARAMS])

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as metrics and strings as tags of at most 5,000 characters.

        ``kwargs`` are passed to ``MlflowClient.log_metric``.
        """
        metric: Any = import_module("mlflow.entities").Metric
        now = int(time.time() * 1000)
        for name, value in _flatten(values).items():
            if isinstance(value, str):
                self._client.set_tag(self._id, name, value[:_MAX_TAG])
            else:
                number = int(value) if isinstance(value, bool) else value
                if kwargs:
                    self._client.log_metric(self._id, name, number, step=step or 0, **kwargs)
                else:
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

    def log_artifact(self, local_path: str, name: str | None = None, *, artifact_path: str | None = None) -> None:
        """Log a file or folder; ``name`` or ``artifact_path`` is the destination folder among the run's artifacts."""
        log = self._client.log_artifacts if os.path.isdir(local_path) else self._client.log_artifact
        log(self._id, local_path, name or artifact_path)

    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Log the contents of a folder; ``artifact_path`` is the destination folder among the run's artifacts."""
        self._client.log_artifacts(self._id, local_dir, artifact_path)

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
