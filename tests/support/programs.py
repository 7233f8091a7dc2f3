"""A small program for pools in tests: runs lines of Python in a worker."""

from __future__ import annotations

import errno
import os
from typing import Any

from accel_nb.pool.local.worker import Worker
from accel_nb.pool.payload import Payloads
from accel_nb.pool.program import TaskResult


class EvalProgram:
    """Executes ``body["before"]``, which cannot be interrupted, then ``body["code"]``; replies with its ``result``.

    The code reads the request's payloads from ``received``; payloads that it binds to ``returned`` are sent back.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.names: dict[str, Any] = {"worker": worker}

    def handle(self, task: str, body: dict[str, Any], payloads: Payloads) -> TaskResult:
        self.names["received"] = payloads
        self.names.pop("returned", None)
        exec(body.get("before", ""), self.names)
        try:
            with self.worker.interruptible():
                exec(body["code"], self.names)
        except KeyboardInterrupt:
            return TaskResult("interrupted", {})
        return TaskResult("done", {"result": self.names.get("result")}, self.names.get("returned", {}))

    def describe_error(self, error: BaseException) -> dict[str, Any]:
        return {"error": {"type": type(error).__name__, "message": str(error)}}

    def on_group_reopened(self) -> None:
        self.names["reopened"] = self.names.get("reopened", 0) + 1

    def finish_step(self) -> bool:
        return self.names["finish"]() if "finish" in self.names else False

    def propose_action(self, action_id: int, action: dict[str, Any]) -> int | None:
        return None

    def decide_action(self, action_id: int, count: int | None) -> None:
        raise AssertionError("no action was accepted")


def refuse_processes() -> None:
    """Make this process, a zygote, unable to fork."""

    def refuse() -> int:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    os.fork = refuse
