"""What workers run: the interface between an engine's worker and a program such as the one that runs cells."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from accel_nb.pool.messages import Outcome
from accel_nb.pool.payload import PayloadFactory, Payloads


@dataclass(frozen=True, slots=True)
class TaskResult:
    """How a task ended; the payloads are sent with the reply and closed after it."""

    outcome: Outcome
    body: dict[str, Any]
    payloads: Payloads = field(default_factory=dict)
    is_torn: bool = False
    """Whether it ended in the middle of an exchange with other ranks, so that the process group is unusable."""


class WorkerLink(Protocol):
    """What a program may use of the worker that runs it, on any engine."""

    @property
    def payloads(self) -> PayloadFactory:
        """The factory of payloads that the worker can send."""
        ...

    def note(self, topic: str, body: dict[str, Any]) -> None:
        """Report something about the running request to the kernel."""
        ...

    def interruptible(self) -> AbstractContextManager[None]:
        """Return a block inside of which interrupts of the running request raise KeyboardInterrupt."""
        ...


class Program(Protocol):
    """The code that a pool's workers run; an engine imports ``module:attribute`` and calls it with the worker."""

    def handle(self, task: str, body: dict[str, Any], payloads: Payloads) -> TaskResult:
        """Run one task in the main thread; user code only inside of `WorkerLink.interruptible`.

        The worker closes ``payloads`` when the task has ended.
        """
        ...

    def describe_error(self, error: BaseException) -> dict[str, Any]:
        """Return a JSON-ready description of an error that `handle` raised, for the kernel to show and raise."""
        ...

    def on_group_reopened(self) -> None:
        """Drop what was built on the old process group: a new one is open."""
        ...

    def finish_step(self) -> bool:
        """End the running task at the next point where nothing is lost, with KeyboardInterrupt, on all ranks at once.

        Called in the monitor thread: it only sets a flag. Returns False if no such point is near.
        """
        ...

    def propose_action(self, action_id: int, action: dict[str, Any]) -> int | None:
        """Hold at the next end of a step until `decide_action` is called; called in the monitor thread.

        Returns how many ends of steps were counted, or None, without holding, if the task has no steps.
        """
        ...

    def decide_action(self, action_id: int, count: int | None) -> None:
        """Do the proposed action when ``count`` ends of steps are counted, or never; called in the monitor thread."""
        ...
