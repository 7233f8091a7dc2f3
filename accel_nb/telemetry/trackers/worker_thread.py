"""Calls of trackers in a separate thread, so that a slow, offline or broken tracker never blocks the training."""

from __future__ import annotations

import logging
import queue
import threading
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from accel_nb.runtime.process.secrets import redact
from accel_nb.telemetry.trackers.base import GeneralTracker, UnsupportedByTracker, plain_number, without_secrets

logger = logging.getLogger(__name__)

MAX_WAITING = 100_000
CLOSE_TIMEOUT_S = 30.0


class TrackerThread:
    """The trackers of one run. Methods return at once, except `wait_started` and `close`.

    The first logged value opens the run; before it, `resume` can select an existing run.
    """

    def __init__(self, trackers: Sequence[GeneralTracker], config: Mapping[str, Any] | None) -> None:
        self.trackers = tuple(trackers)
        self.has_begun = False
        self._config = None if config is None else without_secrets(config)
        self._waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._alive = list(trackers)
        self._started = threading.Event()
        self._num_dropped = 0
        self._unsupported: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="accel_nb trackers", daemon=True)

    def run_ids(self) -> dict[str, str]:
        """Return the id of the run for each backend that has assigned one."""
        ids = {tracker.name: getattr(tracker, "run_id", None) for tracker in self.trackers}
        return {name: run_id for name, run_id in ids.items() if isinstance(run_id, str)}

    def resume(self, run_ids: Mapping[str, str], step: int) -> None:
        """Continue the runs whose ids a checkpoint stores; call before the first value."""
        for tracker in self.trackers:
            # Trackers written for Hugging Face Accelerate have no such method.
            if tracker.name in run_ids and hasattr(tracker, "resume"):
                tracker.resume(run_ids[tracker.name], step)

    def log(self, values: dict[str, Any], step: int | None, options: Mapping[str, Any]) -> None:
        """Log values of one step; ``options`` are keyword arguments of ``log`` by the tracker's name."""
        if not self.has_begun:
            self._begin()
        if self._waiting.qsize() < MAX_WAITING:
            self._waiting.put((_snapshot(values), step, options))
        else:
            self._num_dropped += 1

    def call(
        self, method: str, *arguments: Any, by_name: Mapping[str, Mapping[str, Any]] | None = None, **options: Any
    ) -> None:
        """Queue a call of a method of every tracker; ``by_name`` has further options by the tracker's name."""
        if not self.has_begun:
            self._begin()
        self._waiting.put(partial(_call, method, arguments, options, by_name or {}))

    def wait_started(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Wait until every tracker has started or failed; return False if the timeout has passed before."""
        if not self.has_begun:
            self._begin()
        return self._started.wait(timeout_s)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Log queued values and finish every tracker; warn about those that have not finished within the timeout."""
        if not self.has_begun:
            self._begin()
        self._waiting.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            names = ", ".join(tracker.name for tracker in self._alive)
            logger.warning(
                "trackers did not finish within %.0f s, and their last values may be missing: %s", timeout_s, names
            )
        if self._num_dropped:
            logger.warning("trackers were too slow: %d calls of log() were dropped", self._num_dropped)

    def _begin(self) -> None:
        self.has_begun = True
        self._thread.start()

    def _run(self) -> None:
        self._each(partial(_call_if_present, "start"))
        if self._config is not None:
            config = self._config
            self._each(lambda tracker: tracker.store_init_configuration(dict(config)))
        self._started.set()
        while (item := self._next_item()) is not None:
            self._each(partial(_log, item) if isinstance(item, tuple) else item)
        self._each(partial(_call_if_present, "flush"))
        self._each(lambda tracker: tracker.finish())

    def _next_item(self) -> Any:
        try:
            return self._waiting.get_nowait()
        except queue.Empty:
            self._each(partial(_call_if_present, "flush"))
            return self._waiting.get()

    def _each(self, call: Any) -> None:
        for tracker in list(self._alive):
            try:
                call(tracker)
            except UnsupportedByTracker as problem:
                if str(problem) not in self._unsupported:
                    self._unsupported.add(str(problem))
                    logger.warning("%s; they are not logged there", problem)
            except BaseException:  # SystemExit, or a panic of a library in Rust, must not end the other trackers
                self._alive.remove(tracker)
                why = redact(traceback.format_exc().rstrip())  # errors of services may contain addresses and tokens
                logger.warning(
                    "tracker %s failed and receives no more values; the run continues\n%s", tracker.name, why
                )


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
    function = getattr(tracker, method, None)
    if function is None:
        raise UnsupportedByTracker(f"tracker {tracker.name} has no {method}")
    function(*arguments, **options, **by_name.get(tracker.name, {}))


def _call_if_present(method: str, tracker: GeneralTracker) -> None:
    """Call a method that trackers written for Hugging Face Accelerate lack: `flush`, and of older ones `start`."""
    function = getattr(tracker, method, None)
    if function is not None:
        function()


def _snapshot(value: Any) -> Any:
    """Return a value as it is now: the training may change dictionaries and tensors before the thread reads them."""
    if isinstance(value, Mapping):
        return {name: _snapshot(item) for name, item in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return value if type(value) in (float, int, str) else plain_number(value)
