"""The run that experiment trackers record, and its part of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.telemetry.trackers import GeneralTracker, TrackerThread

_MAX_RUN_ID = 256


@dataclass(frozen=True, slots=True)
class SavedRun:
    """The tracked run in a checkpoint: its project, and its id in each tracker."""

    project: str
    run_ids: Mapping[str, str]
    step: int

    @classmethod
    def from_json(cls, saved: Any, step: int) -> SavedRun | None:
        """Read the output of `to_json`; return None if no run was tracked. Malformed ids are left out."""
        if not isinstance(saved, dict) or not isinstance(saved.get("project"), str):
            return None
        ids = saved.get("run_ids")
        kept = {str(name): run_id for name, run_id in ids.items() if _is_id(run_id)} if isinstance(ids, dict) else {}
        return cls(saved["project"], kept, step)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {"project": self.project, "run_ids": dict(self.run_ids)}


class TrackedRun:
    """The run of an accelerator's trackers: open, resumed from a checkpoint, or ended. Trackers run on rank 0.

    ``num_steps`` returns how many optimizer steps were made.
    """

    def __init__(self, num_steps: Callable[[], int], *, has_trackers: bool) -> None:
        self.thread: TrackerThread | None = None
        """The thread that writes to the trackers; None while no run is open, and on other ranks."""
        self.ended: tuple[GeneralTracker, ...] = ()
        """The trackers of the last run, once it has ended."""
        self._num_steps = num_steps
        self._has_trackers = has_trackers
        self._project = ""
        self._saved: SavedRun | None = None

    def start(self, project: str, thread: TrackerThread | None) -> None:
        """Open a run; it continues the run of a loaded checkpoint if that has the same project."""
        self._project, self.thread, self.ended = project, thread, ()
        if self._saved is not None:
            self._resume(self._saved)

    def end(self) -> TrackerThread | None:
        """End the open run and return its thread, which the caller must close; None if no run is open."""
        if self.thread is None:
            return None
        thread, self.thread, self._saved = self.thread, None, None
        self.ended = thread.trackers
        return thread

    def state(self, comm: Communicator) -> dict[str, Any] | None:
        """Return the values for a checkpoint, equal on all ranks of ``comm``, which must all call."""
        run = self._saved
        if self.thread is not None:
            run = SavedRun(self._project, self.thread.run_ids(), self._num_steps())
        values = None if run is None else run.to_json()
        return comm.broadcast_json(values) if self._has_trackers else values

    def restore(self, saved: Any, step: int) -> list[str]:
        """Continue the run of a checkpoint of ``step``, now or at `start`; return notes for the load report."""
        self._saved = SavedRun.from_json(saved, step)
        if self._saved is None or self.thread is None:
            return []
        if not self.thread.has_begun:
            return self._resume(self._saved)
        return [
            f"{name} continues the open run: values were logged before the checkpoint was loaded"
            for name, run_id in self.thread.run_ids().items()
            if self._saved.run_ids.get(name, run_id) != run_id
        ]

    def _resume(self, saved: SavedRun) -> list[str]:
        if self._project != saved.project:
            return [f"trackers begin the run {self._project!r}: the checkpoint is of {saved.project!r}"]
        if self.thread is not None:
            self.thread.resume(saved.run_ids, saved.step)
        return []


def _is_id(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _MAX_RUN_ID and value.isprintable()
