"""What a tracker is: the well-known interface, so that trackers that were written for it work as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel_nb.runtime.secrets import redacted


class GeneralTracker:
    """A place that values of a run are logged to.

    Subclass it for a tracker of your own: give ``name`` and ``requires_logging_directory``, and override what the
    backend has. All methods are called in one thread of the main rank, `start` first and `finish` last. What they raise
    is reported once, and the training goes on without the tracker.
    """

    name: str = ""
    requires_logging_directory: bool = False
    main_process_only: bool = True

    def __init__(self, _blank: bool = False) -> None:
        """Open nothing yet: that is what `start` is for."""

    @property
    def tracker(self) -> Any:
        """The backend's own object, once started."""
        return None

    def start(self) -> None:
        """Open the run."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the run's configuration; secrets have been taken out."""

    def log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        """Log values of one step: numbers, texts, and dictionaries of numbers."""

    def flush(self) -> None:
        """Bring what was logged to where it stays; called when no more values wait."""

    def finish(self) -> None:
        """Close the run."""


def without_secrets(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with their secrets hidden, at any depth."""
    return redacted(values)
