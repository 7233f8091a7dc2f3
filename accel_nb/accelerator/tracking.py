"""Logging values: to the panel on every rank, to experiment trackers on the main one."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from accel_nb.accelerator.places import Placed
from accel_nb.accelerator.plugins import ProjectConfiguration
from accel_nb.accelerator.stepper import Stepper
from accel_nb.errors import MisuseError
from accel_nb.telemetry.events import MetricLogged, Sink
from accel_nb.telemetry.trackers import GeneralTracker, TrackerFeed, chosen_trackers

_NO_OPTIONS: Mapping[str, Any] = {}


class Tracked(Placed):
    """What an accelerator has to do with values that a script logs."""

    _sink: Sink
    _stepper: Stepper
    _project: ProjectConfiguration
    _tracker_choice: tuple[str | GeneralTracker, ...]
    _feed: TrackerFeed | None = None

    @property
    def logging_dir(self) -> str | os.PathLike[str] | None:
        """Folder of the run's logs and traces: its own, or that of the run."""
        return self._project.project_dir if self._project.logging_dir is None else self._project.logging_dir

    @property
    def log_with(self) -> list[str]:
        """The names of the trackers that values go to."""
        return [item if isinstance(item, str) else item.name for item in self._tracker_choice]

    @property
    def trackers(self) -> list[GeneralTracker]:
        """The trackers of the running run; none before `init_trackers`, after `end_training`, and on other ranks."""
        return [] if self._feed is None else list(self._feed.trackers)

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Begin a run with the trackers of ``log_with``; every rank may call, and the main rank does it.

        ``config`` is stored with the run, without what is named like a secret. ``init_kwargs`` are keyword arguments
        for each tracker by its name. Trackers are opened, written and closed in a thread of their own: one that fails
        is reported once and gets no more values. Raises `MisuseError` if a tracker lacks a folder.
        """
        if not self._world.is_main:
            return
        if self._feed is not None:
            raise MisuseError("init_trackers: a run is being tracked already; end_training() ends it")
        trackers = chosen_trackers(self._tracker_choice, project_name, self.logging_dir, init_kwargs or {})
        self._feed = TrackerFeed(trackers, config) if trackers else None

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker by name, or with ``unwrap`` the backend's own object, for what only that backend can do.

        On ranks other than the main one it is a tracker that does nothing. Raises `MisuseError` for a name that is not
        in ``log_with``, and before `init_trackers`.
        """
        if name not in self.log_with:
            raise MisuseError(f"get_tracker({name!r}): log_with has {', '.join(self.log_with) or 'nothing'}")
        if not self._world.is_main:
            return GeneralTracker()
        if self._feed is None:
            raise MisuseError(f"get_tracker({name!r}): init_trackers has not been called")
        found = next(tracker for tracker in self._feed.trackers if tracker.name == name)
        if not unwrap:
            return found
        self._feed.wait_started()
        return found.tracker

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Report values by name; reading a tensor waits for its device.

        Numbers are drawn in the panel and go to the trackers; texts and dictionaries of numbers to the trackers alone.
        ``log_kwargs`` are keyword arguments of each tracker's ``log`` by the tracker's name. ``step`` is the number of
        optimizer steps if not given. Raises `MisuseError` for other values. Between the steps of a logging interval
        that was set while the cell runs nothing is read and nothing is reported.
        """
        if not self._stepper.meter.is_reporting:
            return
        at = self._stepper.num_steps if step is None else step
        feed = self._feed
        plain: dict[str, Any] = {}
        for name, value in values.items():
            if feed is not None and isinstance(value, str | dict):
                plain[name] = value
                continue
            plain[name] = number = _number(name, value)
            self._sink.emit(MetricLogged(self._world.rank, at, time.time(), str(name), number))
        if feed is not None:
            feed.log(plain, at, log_kwargs or _NO_OPTIONS)

    def end_training(self) -> None:
        """End the run of the trackers: what was logged is written. Every rank may call; does nothing without a run."""
        if self._feed is not None:
            feed, self._feed = self._feed, None
            feed.close()


def _number(name: str, value: Any) -> float:
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError):
        raise MisuseError(
            f"log({name!r}) got a {type(value).__name__}; it takes numbers and tensors of one value, and texts and "
            "dictionaries of numbers where trackers run"
        ) from None
