"""The part of a worker that runs cells: what `CellProgram` uses of it, in each worker and in the zygote."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from accel_nb.pool.payload import MemoryPayloads
from accel_nb.pool.program import WorkerLink
from accel_nb.runtime.distributed.process_group import DefaultGroup
from accel_nb.runtime.world import World
from accel_nb.telemetry.events import Event, EventSink


class CellWorker(WorkerLink, EventSink, Protocol):
    """A worker of the local engine, as far as cells need it."""

    world: World

    @property
    def group(self) -> DefaultGroup | None:
        """The open process group of all ranks; None in the zygote, which is not a rank."""
        ...

    @property
    def was_interrupted(self) -> bool:
        """Whether the running request was interrupted, by the user or because another rank failed."""
        ...

    @property
    def has_raised_interrupt(self) -> bool:
        """Whether KeyboardInterrupt was raised in the user code of the running request."""
        ...

    def send_message_in_order(self, topic: str, body: dict[str, Any]) -> None:
        """Send a message that arrives after the output printed before it, and before the output printed later."""
        ...

    def report_action_done(self, action_id: int, step: int, text: str) -> None:
        """Report that a requested action was performed after a step."""
        ...

    def report_interrupt(self, *, is_raised: bool) -> None:
        """Report that KeyboardInterrupt is raised in the user code, or that the interpreter has ignored it."""
        ...


class ZygoteWorker:
    """Stands in for a worker while the program runs in the zygote: it is one process alone, and sends nothing."""

    group = None
    was_interrupted = False
    has_raised_interrupt = False

    def __init__(self) -> None:
        self.world = World()
        self.payloads = MemoryPayloads()

    def emit(self, event: Event) -> None:
        """Drop the event."""

    def send_message(self, topic: str, body: dict[str, Any]) -> None:
        """Drop the message."""

    def send_message_in_order(self, topic: str, body: dict[str, Any]) -> None:
        """Drop the message."""

    def interruptible(self) -> AbstractContextManager[None]:
        """Return a context manager that does nothing."""
        return nullcontext()

    def report_action_done(self, action_id: int, step: int, text: str) -> None:
        """Drop the report."""

    def report_interrupt(self, *, is_raised: bool) -> None:
        """Drop the report."""
