"""The program of a self-test's workers: one check for each request."""

from __future__ import annotations

import traceback
from typing import Any

from accel_nb.pool.local.worker import Worker
from accel_nb.pool.payload import Payloads
from accel_nb.pool.program import TaskResult
from accel_nb.selftest.checks import CHECKS


class CheckProgram:
    """Runs the check that a request ``check`` names, and returns its result or error."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def handle(self, task: str, body: dict[str, Any], payloads: Payloads) -> TaskResult:
        """Run the check on this rank."""
        try:
            with self._worker.interruptible():
                detail = CHECKS[body["name"]](self._worker.world, lambda: self._worker.send_message("waiting", {}))
        except KeyboardInterrupt:
            return TaskResult("interrupted", {})
        return TaskResult("done", {"detail": detail})

    def describe_error(self, error: BaseException) -> dict[str, Any]:
        """Return the error's message, and where it was raised."""
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = str(error) or place.line
        return {"error": f"{type(error).__name__}: {text} ({place.name}, line {place.lineno})"}

    def on_group_reopened(self) -> None:
        """Do nothing: no check keeps a reference to the process group."""

    def finish_step(self) -> bool:
        """Return False: a check has no steps."""
        return False

    def propose_action(self, action_id: int, action: dict[str, Any]) -> int | None:
        """Return None: a check has no steps."""
        return None

    def decide_action(self, action_id: int, count: int | None) -> None:
        """Do nothing: there is no proposal."""
