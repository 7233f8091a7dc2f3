"""The tracker interface. Trackers written for Hugging Face Accelerate work unchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from accel_nb.errors import MisuseError
from accel_nb.runtime.process.secrets import redacted


class UnsupportedByTracker(MisuseError):
    """Raised by a tracker whose backend does not support a kind of value; other values are logged."""


class GeneralTracker:
    """Base class of trackers, which log the values of a run to a backend.

    Subclass it for another tracker: set ``name`` and ``requires_logging_directory``, and override the methods that the
    backend supports. Except for `resume`, which is called before, all methods are called in one thread of rank 0,
    `start` first and `finish` last. `UnsupportedByTracker` is reported, and other values are still logged; any other
    error is reported once, and the training continues without the tracker.
    """

    name: str = ""
    requires_logging_directory: bool = False
    name_argument: str = "run_name"
    """The constructor argument that receives the ``project_name`` of `init_trackers`."""
    accepts_logging_directory: bool = False
    """Whether the constructor takes ``logging_dir``, which is passed if the run has such a folder."""
    main_process_only: bool = True
    run_id: str | None = None
    """The id of the run in the backend, once assigned. Checkpoints store it, so that a resumed training continues the
    run."""

    def __init__(self, _blank: bool = False) -> None:
        """Do nothing: `start` opens the run. ``_blank`` is ignored, as in Accelerate's signature."""

    @property
    def tracker(self) -> Any:
        """The backend's own object, once started."""
        return None

    def resume(self, run_id: str, step: int) -> None:
        """Set the id of the run that `start` continues, as stored in a checkpoint of step ``step``.

        Called on a resume only, before `start`, in the thread that loads the checkpoint.
        """
        self.run_id = run_id

    def start(self) -> None:
        """Open a new run, or the run that was passed to `resume`."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the run's configuration, from which secrets have been removed."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values of one step: numbers, strings, and dictionaries of numbers."""

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log pictures by name, of the types that `accel_nb.telemetry.trackers.pictures` converts."""
        raise UnsupportedByTracker(f"tracker {self.name} does not support images")

    def log_table(
        self, table_name: str, columns: Sequence[str], data: Sequence[Sequence[Any]], step: int | None = None
    ) -> None:
        """Log a table of numbers and strings, row by row."""
        raise UnsupportedByTracker(f"tracker {self.name} does not support tables")

    def log_artifact(self, local_path: str, name: str | None = None) -> None:
        """Store a file or a folder with the run."""
        raise UnsupportedByTracker(f"tracker {self.name} does not support artifacts")

    def flush(self) -> None:
        """Write buffered values; called when the queue is empty."""

    def finish(self) -> None:
        """Close the run."""


class NoTracker(GeneralTracker):
    """A tracker that does nothing, for ranks that do not track."""

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Do nothing."""

    def log_table(
        self, table_name: str, columns: Sequence[str], data: Sequence[Sequence[Any]], step: int | None = None
    ) -> None:
        """Do nothing."""

    def log_artifact(self, local_path: str, name: str | None = None) -> None:
        """Do nothing."""


def without_secrets(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with secrets hidden at any depth."""
    return redacted(values)


def flatten_names(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values as a flat dict with names such as ``outer/inner``, for backends without nested values."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= flatten_names(value, f"{prefix}{name}/")  # pyright: ignore[reportUnknownArgumentType]
        else:
            found[f"{prefix}{name}"] = value
    return found


def json_value(value: Any) -> Any:
    """Return a value that JSON can represent; values of other types are converted to text."""
    if isinstance(value, Mapping):
        return {str(name): json_value(item) for name, item in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    value = plain_number(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def plain_number(value: Any) -> Any:
    """Return the Python number of a NumPy scalar, or of a tensor of one value; other values unchanged."""
    if not hasattr(value, "dtype") or not hasattr(value, "item"):
        return value
    try:
        return value.item()
    except (RuntimeError, ValueError):  # it has several values
        return value
