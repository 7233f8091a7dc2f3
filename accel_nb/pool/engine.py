"""The seam between a pool and the processes it runs on: six calls, the same for every kind of engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from accel_nb.runtime.process.oom_detection import Verdict
from accel_nb.telemetry.events import Event


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Where one worker runs: a torch device string and how many threads it may use."""

    device: str
    num_threads: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """A record came from a rank, with descriptors that now belong to the receiver."""

    rank: int
    record: object
    descriptors: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Printed:
    """A rank wrote bytes to its standard output or error stream."""

    rank: int
    stream: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Measured:
    """A rank recorded numbers."""

    rank: int
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """A rank's process is gone; ``code`` is negative for a signal. ``reason`` is set when it could not be started.

    ``stack`` is the last Python stack of one that crashed. ``killed_for`` says of a SIGKILL whether memory ran out.
    """

    rank: int
    code: int
    reason: str = ""
    stack: str = ""
    killed_for: Verdict = "unknown"


@dataclass(frozen=True, slots=True)
class Seen:
    """What a rank looks like from outside: the system's letter for its state, and its Python stack.

    The rank was told to write its stack and does so when the system lets it: ``read_stack`` returns what is new by now.
    """

    rank: int
    state: str
    read_stack: Callable[[], str]


Arrival = Arrived | Printed | Measured | Ended | Seen


class Engine(Protocol):
    """Starts workers and moves records to and from them; knows nothing of cells."""

    def start(self, specs: Sequence[WorkerSpec]) -> None:
        """Start one worker for each spec, ending those that run; a `WorkerReady` record arrives from each."""
        ...

    def send(self, rank: int, record: object, descriptors: Sequence[int] = (), *, urgent: bool = False) -> bool:
        """Send a record to a rank, also past a busy main thread when ``urgent``; False when the rank is gone."""
        ...

    def poll(self, timeout_s: float) -> list[Arrival]:
        """Return what has arrived, waiting at most ``timeout_s`` for the first of it."""
        ...

    def kill(self, rank: int) -> None:
        """End a rank at once; an `Ended` arrives."""
        ...

    def replace(self, ranks: Sequence[int]) -> int:
        """Start fresh workers in place of ended ones; returns a store descriptor that the others reopen with."""
        ...

    def stop(self) -> None:
        """End every process and free everything; calling it twice is harmless."""
        ...
