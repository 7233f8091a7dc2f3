"""Hands values to trackers in a thread of its own: a tracker that is slow, down or broken never stops the training."""

from __future__ import annotations

import logging
import queue
import threading
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from accel_nb.runtime.process.secrets import redact
from accel_nb.telemetry.trackers.base import GeneralTracker, NotKept, without_secrets

logger = logging.getLogger(__name__)

MAX_WAITING = 100_000
CLOSE_PATIENCE_S = 30.0


class TrackerFeed:
    """The trackers of one run; every method but the thread's own returns at once, save `wait_started` and `close`.

    The run is opened when the first value comes: until then `resume` can say which one is to go on.
    """

    def __init__(self, trackers: Sequence[GeneralTracker], config: Mapping[str, Any] | None) -> None:
        self.trackers = tuple(trackers)
        self.has_begun = False
        self._config = None if config is None else without_secrets(config)
        self._waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._alive = list(trackers)
        self._started = threading.Event()
        self._num_dropped = 0
        self._left_out: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="accel_nb trackers", daemon=True)

    def run_ids(self) -> dict[str, str]:
        """Return by which name each backend knows the run, as far as that is settled."""
        ids = {tracker.name: getattr(tracker, "run_id", None) for tracker in self.trackers}
        return {name: run_id for name, run_id in ids.items() if isinstance(run_id, str)}

    def resume(self, run_ids: Mapping[str, str], step: int) -> None:
        """Go on with the runs that a checkpoint names; before the first value."""
        for tracker in self.trackers:
            # Trackers that were written for the other package have no such method.
            if tracker.name in run_ids and hasattr(tracker, "resume"):
                tracker.resume(run_ids[tracker.name], step)

    def log(self, values: dict[str, Any], step: int | None, options: Mapping[str, Any]) -> None:
        """Log values of one step; ``options`` are keyword arguments of a tracker's ``log`` by its name."""
        if not self.has_begun:
            self._begin()
        if self._waiting.qsize() < MAX_WAITING:
            self._waiting.put((values, step, options))
        else:
            self._num_dropped += 1

    def call(
        self, method: str, *arguments: Any, by_name: Mapping[str, Mapping[str, Any]] | None = None, **options: Any
    ) -> None:
        """Call a method of every tracker, when its turn comes; ``by_name`` are more options of one by its name."""
        if not self.has_begun:
            self._begin()
        self._waiting.put(partial(_call, method, arguments, options, by_name or {}))

    def wait_started(self, timeout_s: float = CLOSE_PATIENCE_S) -> bool:
        """Wait until every tracker has been started, or has failed to; returns whether that happened in time."""
        if not self.has_begun:
            self._begin()
        return self._started.wait(timeout_s)

    def close(self, timeout_s: float = CLOSE_PATIENCE_S) -> None:
        """Log what waits and finish every tracker; one that hangs is left behind after the timeout, and said so."""
        if not self.has_begun:
            self._begin()
        self._waiting.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            names = ", ".join(tracker.name for tracker in self._alive)
            logger.warning("trackers did not finish within %.0f s and are left behind: %s", timeout_s, names)
        if self._num_dropped:
            logger.warning("trackers were too slow: %d calls of log() were dropped", self._num_dropped)

    def _begin(self) -> None:
        self.has_begun = True
        self._thread.start()

    def _run(self) -> None:
        self._each(lambda tracker: tracker.start())
        if self._config is not None:
            config = self._config
            self._each(lambda tracker: tracker.store_init_configuration(dict(config)))
        self._started.set()
        while (item := self._take()) is not None:
            self._each(partial(_log, item) if isinstance(item, tuple) else item)
        self._each(_flush)
        self._each(lambda tracker: tracker.finish())

    def _take(self) -> Any:
        try:
            return self._waiting.get_nowait()
        except queue.Empty:
            self._each(_flush)
            return self._waiting.get()

    def _each(self, call: Any) -> None:
        for tracker in list(self._alive):
            try:
                call(tracker)
            except NotKept as problem:
                if str(problem) not in self._left_out:
                    self._left_out.add(str(problem))
                    logger.warning("%s; they are left out there", problem)
            except Exception:
                self._alive.remove(tracker)
                why = redact(traceback.format_exc().rstrip())  # services put addresses and tokens into their errors
                logger.warning("tracker %s failed and gets no more values; the run goes on\n%s", tracker.name, why)


def _log(item: tuple[dict[str, Any], int | None, Mapping[str, Any]], tracker: GeneralTracker) -> None:
    values, step, options = item
    tracker.log(without_secrets(values), step, **options.get(tracker.name, {}))


def _call(
    method: str,
    arguments: Sequence[Any],
    options: Mapping[str, Any],
    by_name: Mapping[str, Mapping[str, Any]],
    tracker: GeneralTracker,
) -> None:
    found = getattr(tracker, method, None)
    if found is None:
        raise NotKept(f"tracker {tracker.name} has no {method}")
    found(*arguments, **options, **by_name.get(tracker.name, {}))


def _flush(tracker: GeneralTracker) -> None:
    flush = getattr(tracker, "flush", None)  # trackers that were written for the other package have none
    if flush is not None:
        flush()
