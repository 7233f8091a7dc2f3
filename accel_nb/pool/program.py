"""The interface between a worker and the program that it runs, such as the one that runs cells.

An engine, the backend that starts the workers (on this machine, by ssh, Slurm, Ray or kubectl), provides the worker.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from accel_nb.pool.messages import Outcome
from accel_nb.pool.payload import PayloadFactory, Payloads


@dataclass(frozen=True, slots=True)
class TaskResult:
    """The result of a task; the worker sends the payloads with the reply and then closes them."""

    outcome: Outcome
    body: dict[str, Any]
    payloads: Payloads = field(default_factory=dict)
    interrupted_exchange: bool = False
    """Whether the task ended in the middle of an exchange with other ranks, which leaves the process group unusable."""


class WorkerLink(Protocol):
    """The part of a worker that its program may use, the same on every engine."""

    @property
    def payloads(self) -> PayloadFactory:
        """The factory of payloads that the worker can send."""
        ...

    def send_message(self, topic: str, body: dict[str, Any]) -> None:
        """Send a message about the running task to the kernel."""
        ...

    def interruptible(self) -> AbstractContextManager[None]:
        """Return a context manager; inside of it interrupts of the running task raise KeyboardInterrupt."""
        ...


class Program(Protocol):
    """The code that a pool's workers run; an engine imports ``module:attribute`` and calls it with the worker."""

    def handle(self, task: str, body: dict[str, Any], payloads: Payloads) -> TaskResult:
        """Run one task in the main thread; user code runs only inside of `WorkerLink.interruptible`.

        The worker closes ``payloads`` when the task has ended.
        """
        ...

    def describe_error(self, error: BaseException) -> dict[str, Any]:
        """Return a JSON-ready description of an error that `handle` raised, for the kernel to display and raise."""
        ...

    def on_group_reopened(self) -> None:
        """Drop all objects that use the old process group: a new one is open."""
        ...

    def finish_step(self) -> bool:
        """Request that the running task end with KeyboardInterrupt, on all ranks after the same step.

        Called in the monitor thread: it only sets a flag. Return False if the task cannot end at a
        step, or if no end of a step is expected soon.
        """
        ...

    def propose_action(self, action_id: int, action: dict[str, Any]) -> int | None:
        """Make the main thread wait at its next end of a step until `decide_action`. Does not block.

        Return how many ends of steps were counted; None, without a wait of the main thread, if the task has no steps.
        Called in the monitor thread.
        """
        ...

    def decide_action(self, action_id: int, count: int | None) -> None:
        """Perform the proposed action when ``count`` ends of steps are counted; None: do not perform it.

        Called in the monitor thread.
        """
        ...
