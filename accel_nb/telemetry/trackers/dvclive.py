"""The tracker for DVCLive."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from accel_nb.telemetry.trackers.base import GeneralTracker, UnsupportedByTracker, flatten_names, json_value
from accel_nb.telemetry.trackers.pictures import numbered, pictures, squeeze_channel


class DvcliveTracker(GeneralTracker):
    """Writes to the folder ``LOGGING_DIR/RUN``; an existing run of that name is continued.

    Without a ``logging_dir`` the folder is that of DVCLive itself, ``dvclive``, whatever the name of the run: a new run
    replaces the one there, except on a resume.
    """

    name = "dvclive"
    accepts_logging_directory = True

    def __init__(
        self,
        run_name: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        live: Any = None,
        **kwargs: Any,
    ) -> None:
        """Set the folder; ``kwargs`` are passed to ``dvclive.Live``. With ``live``, log to that object.

        By default no experiment is saved in Git, and no ``dvc.yaml`` is written.
        """
        super().__init__()
        self.run_id = run_name
        default = "dvclive" if logging_dir is None else Path(logging_dir) / (run_name or "")
        folder = kwargs.pop("dir", None)
        self.folder = Path(folder or default)
        self._continues = bool(folder) or logging_dir is not None
        self._options = {"save_dvc_exp": False, "dvcyaml": None, **kwargs}
        self._live = live

    @property
    def tracker(self) -> Any:
        """The ``dvclive.Live``."""
        return self._live

    live = tracker  # the name in Hugging Face Accelerate

    def resume(self, run_id: str, step: int) -> None:
        """Continue the run in the folder."""
        self._continues = True

    def start(self) -> None:
        """Open the folder."""
        if self._live is not None:
            return
        live: Any = import_module("dvclive").Live
        resumes = self._continues and (self.folder / "metrics.json").exists()
        self._live = live(**{"dir": str(self.folder), "resume": resumes, **self._options})

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log the configuration as parameters."""
        self._live.log_params(json_value(values))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers and strings as metrics; without ``step`` DVCLive's own counter is used and advanced.

        ``kwargs`` are passed to ``log_metric``.
        """
        if step is not None:
            self._live.step = step
        for name, value in flatten_names(values).items():
            self._live.log_metric(name, value, **kwargs)
        if step is None:
            self._live.next_step()

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log pictures as PNG files: the newest of each name, or with ``cache_images`` one for each step."""
        if step is not None:
            self._live.step = step
        for name, value in values.items():
            for key, item in numbered(name, pictures(value)).items():
                self._live.log_image(f"{key.replace('/', '_')}.png", squeeze_channel(item))

    def log_table(
        self, table_name: str, columns: Sequence[str], data: Sequence[Sequence[Any]], step: int | None = None
    ) -> None:
        """Raise `UnsupportedByTracker`: DVCLive has no tables."""
        raise UnsupportedByTracker(f"tracker {self.name} does not support tables")

    def log_artifact(self, local_path: str, name: str | None = None) -> None:
        """Track a file or folder with DVC; the current folder must be in a DVC repository."""
        if import_module("dvclive.dvc").get_dvc_repo() is None:
            raise UnsupportedByTracker(f"tracker {self.name} does not support artifacts outside of a DVC repository")
        self._live.log_artifact(local_path, name=name)

    def flush(self) -> None:
        """Write the summary."""
        self._live.make_summary()

    def finish(self) -> None:
        """Complete the files."""
        self._live.end()
