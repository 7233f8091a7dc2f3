"""The tracker for ClearML."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from accel_nb.runtime.process.environment import get_variable
from accel_nb.telemetry.trackers.base import GeneralTracker, flatten_names, json_value
from accel_nb.telemetry.trackers.pictures import numbered, pictures, squeeze_channel


class ClearmlTracker(GeneralTracker):
    """A task of the project that `init_trackers` names; ``CLEARML_OFFLINE_MODE=1`` stores it on the local disk.

    If the process has a task already, values are logged to that task, and it stays open.

    The server assigns the id of a task when it is opened. Offline tasks cannot be continued: a resumed training starts
    a new one, which ``Task.import_offline_session(..., previous_task_id=...)`` appends to the first.
    """

    name = "clearml"

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        """Set the project's name, ``run_name``; ``kwargs`` go to ``Task.init``. Automatic recording is off by default.

        The variables ``CLEARML_PROJECT`` and ``CLEARML_TASK`` have priority over ``run_name``.
        """
        super().__init__()
        self._is_own = True
        self._options = {
            "project_name": get_variable("CLEARML_PROJECT", run_name),
            "task_name": get_variable("CLEARML_TASK", run_name),
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
        if (current := task.current_task()) is not None:
            self._task, self._is_own, self.run_id = current, False, current.id
            return
        # ClearML's reporter forks this process; the child would deadlock on threads that exist in the parent only.
        task._report_subprocess_enabled = False
        resume_options = {} if self.run_id is None or task.is_offline() else {"continue_last_task": self.run_id}
        self._task = task.init(**{**self._options, **resume_options})
        if resume_options:
            self._task.set_initial_iteration(0)
        self.run_id = self._task.id

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Connect the configuration."""
        self._task.connect_configuration(json_value(values))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Report strings and scalars; without a step, report single values.

        One chart shows the numbers of a dictionary, and another those of ``train_NAME``, ``eval_NAME`` and
        ``test_NAME``. ``kwargs`` are passed to ``report_scalar`` and ``report_single_value``.
        """
        logger = self._task.get_logger()
        for name, value in values.items():
            if isinstance(value, str):
                logger.report_text(f"{name}: {value}", print_console=False)
                continue
            lines = flatten_names(value) if isinstance(value, dict) else {name: value}
            for key, number in lines.items():
                if step is None:
                    logger.report_single_value(key, number, **kwargs)
                else:
                    title, series = (name, key) if isinstance(value, dict) else _title_and_series(name)
                    logger.report_scalar(title, series, number, step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Report pictures; ``kwargs`` are passed to ``report_image``."""
        for name, value in values.items():
            for key, item in numbered(name, pictures(value)).items():
                self._task.get_logger().report_image(
                    name, key, iteration=step or 0, image=squeeze_channel(item), **kwargs
                )

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
        """Report a table of rows or of a data frame; without ``columns`` the first row has the names.

        ``kwargs`` are passed to ``report_table``.
        """
        rows = [list(row) for row in ([columns] if columns else []) + list(data or [])]
        title, series = _title_and_series(table_name)
        self._task.get_logger().report_table(
            title, series, iteration=step or 0, table_plot=rows if dataframe is None else dataframe, **kwargs
        )

    def log_artifact(self, local_path: str, name: str | None = None) -> None:
        """Upload a file or folder."""
        self._task.upload_artifact(name or os.path.basename(os.path.abspath(local_path)), local_path)

    def finish(self) -> None:
        """Close the task, unless it was open before."""
        if self._is_own:
            self._task.close()


def _title_and_series(name: str) -> tuple[str, str]:
    """Return the chart and the line in it for a number by name, as Hugging Face Accelerate chooses them."""
    prefix, _, rest = name.partition("_")
    return (rest, prefix) if prefix in ("train", "eval", "test") and rest else (name, "train")
