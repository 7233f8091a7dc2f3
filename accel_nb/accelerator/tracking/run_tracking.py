"""Logging of values: to the panel on every rank, to experiment trackers on rank 0."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from accel_nb.accelerator.options.plugins import ProjectConfiguration
from accel_nb.accelerator.process_state import ProcessView
from accel_nb.accelerator.tracking.tracked_run import TrackedRun
from accel_nb.accelerator.training.stepper import Stepper
from accel_nb.errors import MisuseError
from accel_nb.telemetry.events import EventSink, MetricLogged
from accel_nb.telemetry.trackers import (
    CLOSE_TIMEOUT_S,
    GeneralTracker,
    NoTracker,
    TrackerThread,
    build_trackers,
    pictures,
)

_NO_OPTIONS: Mapping[str, Any] = {}


class TrackingMixin(ProcessView):
    """The methods of an accelerator that log values and control trackers."""

    _sink: EventSink
    _stepper: Stepper
    _project: ProjectConfiguration
    _tracker_choice: tuple[str | GeneralTracker, ...]
    _tracked: TrackedRun

    @property
    def logging_dir(self) -> str | os.PathLike[str] | None:
        """Folder of the run's logs and traces; by default ``project_dir``."""
        return self._project.project_dir if self._project.logging_dir is None else self._project.logging_dir

    @property
    def log_with(self) -> list[str]:
        """The names of the trackers to which `log` writes."""
        return [item if isinstance(item, str) else item.name for item in self._tracker_choice]

    @property
    def trackers(self) -> list[GeneralTracker]:
        """The trackers of the current run, or of the last one; none before `init_trackers`, and on ranks other than 0.

        Waits until they are open.
        """
        thread = self._tracked.thread
        if thread is None:
            return list(self._tracked.ended)
        thread.wait_started()
        return list(thread.trackers)

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Begin a run with the trackers of ``log_with``; every rank may call, only rank 0 begins the run.

        ``config`` is stored with the run, without values whose names indicate secrets. ``init_kwargs`` are keyword
        arguments for each tracker by its name. A separate thread opens the trackers when the first value is logged,
        writes to them and closes them. A tracker that fails is reported once and receives no more values. If a
        checkpoint of a run with this name was loaded before the first value, that run is continued. Raises
        `MisuseError` if a tracker needs a folder and none is given.
        """
        if not self._world.is_main:
            return
        if self._tracked.thread is not None:
            raise MisuseError("init_trackers: a run is being tracked already; end it with end_training()")
        trackers = build_trackers(self._tracker_choice, project_name, self.logging_dir, init_kwargs or {})
        self._tracked.start(project_name, TrackerThread(trackers, config) if trackers else None)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker by name, or with ``unwrap`` the backend's own object, for functions of that backend only.

        Waits until the trackers are open. On ranks other than rank 0 the tracker does nothing. Raises
        `MisuseError` for a name that is not in ``log_with``, and before `init_trackers`.
        """
        if name not in self.log_with:
            raise MisuseError(f"get_tracker({name!r}): log_with has {', '.join(self.log_with) or 'nothing'}")
        if not self._world.is_main:
            return NoTracker()
        found = next((tracker for tracker in self.trackers if tracker.name == name), None)
        if found is None:
            raise MisuseError(f"get_tracker({name!r}): init_trackers has not been called")
        return found.tracker if unwrap else found

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Report values by name; reading a tensor waits for its device.

        Numbers are drawn in the panel and sent to the trackers; strings and dictionaries of numbers are sent to the
        trackers only. ``log_kwargs`` are keyword arguments of each tracker's ``log`` by the tracker's name. ``step`` is
        the number of optimizer steps by default. If the user has set a logging interval while the cell runs, values
        of the steps between are neither read nor reported. Raises `MisuseError` for other values.
        """
        if not self._stepper.meter.is_reporting:
            return
        at = self._tracked_step(step)
        shown = self._stepper.meter.run_step if step is None else step
        thread, rank, now = self._tracked.thread, self._world.rank, time.time()
        # If the sink supports it, without an event object, which costs more to make than to write.
        emit = getattr(self._sink, "emit_metric", None) or self._emit_metric
        plain: dict[str, Any] = {}
        for name, value in values.items():
            if type(value) is not float:
                if isinstance(value, (str, dict)) and self._has_trackers:
                    plain[name] = value
                    continue
                number = _number(name, value)
                plain[name] = value if type(value) is int else number
                value = number
            else:
                plain[name] = value
            emit(rank, shown, now, str(name), value)
        if thread is not None:
            thread.log(plain, at, log_kwargs or _NO_OPTIONS)

    def _tracked_step(self, step: int | None) -> int | None:
        """Return the step that trackers get: the number of optimizer steps if none is given."""
        return self._stepper.num_steps if step is None else step

    @property
    def _has_trackers(self) -> bool:
        """Whether a run has been begun on this rank; on ranks other than 0, whether `log_with` has trackers."""
        return self._tracked.thread is not None or bool(self._tracker_choice and not self._world.is_main)

    def _emit_metric(self, rank: int, step: int, now: float, name: str, value: float) -> None:
        self._sink.emit(MetricLogged(rank, step, now, name, value))

    def log_images(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Send images by name to the trackers that support them; every rank may call, rank 0's are used.

        An image is a PIL image, an array (height, width[, channels]) or a tensor ([channels, ]height, width), of bytes
        or of floats from 0 to 1; several are a list or a batch. They are copied in the call. ``log_kwargs`` are keyword
        arguments of each tracker's ``log_images`` by its name. Raises `MisuseError` for other values.
        """
        if self._tracked.thread is not None:
            copies = {str(name): pictures(value) for name, value in values.items()}
            at = self._tracked_step(step)
            self._tracked.thread.call("log_images", copies, step=at, by_name=log_kwargs or _NO_OPTIONS)

    def log_table(
        self, name: str, columns: Sequence[str], data: Sequence[Sequence[Any]], step: int | None = None
    ) -> None:
        """Send a table, as rows, to the trackers that support it; every rank may call, rank 0's is used."""
        if self._tracked.thread is not None:
            rows = [list(row) for row in data]
            at = self._tracked_step(step)
            self._tracked.thread.call("log_table", name, list(columns), rows, step=at)

    def log_artifact(self, path: str | os.PathLike[str], name: str | None = None) -> None:
        """Store a file or folder with the run in trackers that support it; every rank may call, only rank 0 stores.

        The file is read later: do not change it before `end_training`. Raises `MisuseError` if it does not exist.
        """
        if self._tracked.thread is not None:
            if not os.path.exists(path):
                raise MisuseError(f"log_artifact: there is no {os.fspath(path)}")
            self._tracked.thread.call("log_artifact", os.fspath(path), name=name)

    def end_training(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """End the run and write all logged values. Every rank may call; does nothing without a run.

        Trackers that take longer than ``timeout_s`` seconds, for example to upload large files, are abandoned with a
        warning.
        """
        thread = self._tracked.end()
        if thread is not None:
            thread.close(timeout_s)


def number_of(value: Any) -> float | None:
    """Return a number, or the value of a tensor of one; None for anything else."""
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def _number(name: str, value: Any) -> float:
    found = number_of(value)
    if found is None:
        raise MisuseError(
            f"log({name!r}) got a {type(value).__name__}; it takes numbers and tensors of one value, and strings and "
            "dictionaries of numbers where trackers run"
        )
    return found
