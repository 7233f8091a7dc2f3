"""Reports of a script's rank 0 while it trains: a receipt on the terminal, metrics and checkpoints in the record.

Steps are not recorded: `RunLog.emit_step` does nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_nb.runtime.world import World
from accel_nb.telemetry.events import CheckpointSaved, Event, MetricLogged, WorkerPrepared

if TYPE_CHECKING:
    from accel_nb.telemetry.trackers.worker_thread import TrackerThread


class RunLog:
    """An event sink that writes in its own thread. On other ranks than 0, or without a folder, it writes nothing."""

    def __init__(self, folder: str | None, world: World | None) -> None:
        self._world = world or World()
        self._folder = folder if self._world.is_main and folder is not None and Path(folder).is_dir() else None
        self._tracker_thread: TrackerThread | None = None

    def emit(self, event: Event) -> None:
        """Record or show one event."""
        if isinstance(event, WorkerPrepared):
            self._show(event)
        elif isinstance(event, MetricLogged):
            self._write({event.name: event.value}, event.step)
        elif isinstance(event, CheckpointSaved):
            self._write({"checkpoint": event.url}, event.step)

    def emit_step(self, *values: object) -> None:
        """Do nothing with a step's measurements."""

    def close(self) -> None:
        """Write the queued rows."""
        if self._tracker_thread is not None:
            self._tracker_thread.close()

    def _write(self, values: dict[str, Any], step: int) -> None:
        if self._folder is None:
            return
        if self._tracker_thread is None:  # most scripts log nothing and do not need these modules
            from accel_nb.runs.record import METRICS
            from accel_nb.telemetry.trackers.jsonl import JsonlTracker
            from accel_nb.telemetry.trackers.worker_thread import TrackerThread

            self._tracker_thread = TrackerThread([JsonlTracker(METRICS, self._folder)], None)
        self._tracker_thread.log(values, step, {})

    def _show(self, event: WorkerPrepared) -> None:
        if not self._world.is_main or self._world.size == 1:
            return
        parts = [f"{self._world.size} ranks", event.strategy, f"precision {event.precision}"]
        if event.objects:
            parts.append("prepared " + ", ".join(event.objects))
        print(" · ".join([*parts, *event.notes]), file=sys.stderr)
