"""Hands values to trackers in a thread of its own: a tracker that is slow, down or broken never stops the training."""

from __future__ import annotations

import logging
import queue
import threading
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from accel_nb.runtime.secrets import redact
from accel_nb.telemetry.trackers.base import GeneralTracker, without_secrets

logger = logging.getLogger(__name__)

MAX_WAITING = 100_000
CLOSE_PATIENCE_S = 30.0


class TrackerFeed:
    """The trackers of one run; every method but the thread's own returns at once, save `wait_started` and `close`."""

    def __init__(self, trackers: Sequence[GeneralTracker], config: Mapping[str, Any] | None) -> None:
        self.trackers = tuple(trackers)
        self._config = None if config is None else without_secrets(config)
        self._waiting: queue.SimpleQueue[tuple[dict[str, Any], int | None, Mapping[str, Any]] | None] = (
            queue.SimpleQueue()
        )
        self._alive = list(trackers)
        self._started = threading.Event()
        self._num_dropped = 0
        self._thread = threading.Thread(target=self._run, name="accel_nb trackers", daemon=True)
        self._thread.start()

    def log(self, values: dict[str, Any], step: int | None, options: Mapping[str, Any]) -> None:
        """Log values of one step; ``options`` are keyword arguments of a tracker's ``log`` by its name."""
        if self._waiting.qsize() < MAX_WAITING:
            self._waiting.put((values, step, options))
        else:
            self._num_dropped += 1

    def wait_started(self, timeout_s: float = CLOSE_PATIENCE_S) -> bool:
        """Wait until every tracker has been started, or has failed to; returns whether that happened in time."""
        return self._started.wait(timeout_s)

    def close(self, timeout_s: float = CLOSE_PATIENCE_S) -> None:
        """Log what waits and finish every tracker; one that hangs is left behind after the timeout, and said so."""
        self._waiting.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            names = ", ".join(tracker.name for tracker in self._alive)
            logger.warning("trackers did not finish within %.0f s and are left behind: %s", timeout_s, names)
        if self._num_dropped:
            logger.warning("trackers were too slow: %d calls of log() were dropped", self._num_dropped)

    def _run(self) -> None:
        self._each(lambda tracker: tracker.start())
        if self._config is not None:
            config = self._config
            self._each(lambda tracker: tracker.store_init_configuration(dict(config)))
        self._started.set()
        while (item := self._take()) is not None:
            self._each(partial(_log, item))
        self._each(_flush)
        self._each(lambda tracker: tracker.finish())

    def _take(self) -> tuple[dict[str, Any], int | None, Mapping[str, Any]] | None:
        try:
            return self._waiting.get_nowait()
        except queue.Empty:
            self._each(_flush)
            return self._waiting.get()

    def _each(self, call: Any) -> None:
        for tracker in list(self._alive):
            try:
                call(tracker)
            except Exception:
                self._alive.remove(tracker)
                why = redact(traceback.format_exc().rstrip())  # services put addresses and tokens into their errors
                logger.warning("tracker %s failed and gets no more values; the run goes on\n%s", tracker.name, why)


def _log(item: tuple[dict[str, Any], int | None, Mapping[str, Any]], tracker: GeneralTracker) -> None:
    values, step, options = item
    tracker.log(without_secrets(values), step, **options.get(tracker.name, {}))


def _flush(tracker: GeneralTracker) -> None:
    flush = getattr(tracker, "flush", None)  # trackers that were written for the other package have none
    if flush is not None:
        flush()
