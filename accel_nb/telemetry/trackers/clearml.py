"""ClearML."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from accel_nb.telemetry.trackers.base import GeneralTracker, flatten_names, json_value
from accel_nb.telemetry.trackers.pictures import numbered, pictures, squeeze_channel


class ClearmlTracker(GeneralTracker):
    """A task of the project that `init_trackers` names; ``CLEARML_OFFLINE_MODE=1`` stores it on the local disk.

    The server assigns the id of a task when it is opened. Offline tasks cannot be continued: a resumed training starts
    a new one, which ``Task.import_offline_session(..., previous_task_id=...)`` appends to the first.
    """

    name = "clearml"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        """Set the project's name; ``kwargs`` are passed to ``Task.init``. Automatic recording is off by default."""
        super().__init__()
        self._options = {
            "project_name": run_name,
            "task_name": run_name,
            "reuse_last_task_id": False,
            "auto_connect_arg_parser": False,
            "auto_connect_frameworks": False,
            "auto_connect_streams": False,
            "auto_resource_monitoring": False,
            **kwargs,
        }
        self._task: Any = None

    @property
    def tracker(self) -> Any:
        """The ``clearml.Task``."""
        return self._task

    task = tracker  # the name in Hugging Face Accelerate

    def start(self) -> None:
        """Open the task."""
        task: Any = import_module("clearml").Task
        # ClearML's reporter forks this process; the child would deadlock on threads that exist in the parent only.
        task._report_subprocess_enabled = False
        resume_options = {} if self.run_id is None or task.is_offline() else {"continue_last_task": self.run_id}
        self._task = task.init(**{**self._options, **resume_options})
        if resume_options:
            self._task.set_initial_iteration(0)
        self.run_id = self._task.id

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Connect the configuration."""
        self._task.connect_configuration(json_value(values), name="configuration")

    def log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        """Report texts and scalars, those of a dictionary in one chart; without a step, report single values."""
        logger = self._task.get_logger()
        for name, value in values.items():
            if isinstance(value, str):
                logger.report_text(f"{name}: {value}", print_console=False)
                continue
            series = flatten_names(value) if isinstance(value, dict) else {name: value}
            for key, number in series.items():
                if step is None:
                    logger.report_single_value(key, number)
                else:
                    logger.report_scalar(name, key, number, step)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Report pictures; ``kwargs`` are passed to ``report_image``."""
        for name, value in values.items():
            for key, item in numbered(name, pictures(value)).items():
                self._task.get_logger().report_image(
                    name, key, iteration=step or 0, image=squeeze_channel(item), **kwargs
                )

    def log_table(
        self, table_name: str, columns: Sequence[str], data: Sequence[Sequence[Any]], step: int | None = None
    ) -> None:
        """Report the table."""
        rows = [list(columns), *(list(row) for row in data)]
        self._task.get_logger().report_table(table_name, table_name, iteration=step or 0, table_plot=rows)

    def log_artifact(self, local_path: str, name: str | None = None) -> None:
        """Upload a file or folder."""
        self._task.upload_artifact(name or os.path.basename(os.path.abspath(local_path)), local_path)

    def finish(self) -> None:
        """Close the task."""
        self._task.close()
