"""The interface between a pool and the processes that it runs on, the same for every kind of engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from accel_nb.config.engine_section import EngineOptions
from accel_nb.pool.payload import NO_PAYLOADS, Payload, PayloadFactory, Payloads
from accel_nb.runtime.process.hardware import Machine
from accel_nb.runtime.process.oom_detection import KillCause
from accel_nb.telemetry.events import Event


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The torch device of one worker, the number of threads that it may use, and the node that it runs on."""

    device: str
    num_threads: int
    node: int = 0
    """The number of the node, from 0. The local rank of a worker is its position among the workers of its node."""


def ranks_of_node(specs: Sequence[WorkerSpec], node: int) -> list[int]:
    """Return the ranks of the workers on a node, in the order of their local ranks."""
    return [rank for rank, spec in enumerate(specs) if spec.node == node]


@dataclass(frozen=True, slots=True)
class RecordArrived:
    """A record from a rank, with payloads that the receiver must close."""

    rank: int
    record: object
    payloads: Payloads = field(default_factory=dict[str, Payload])


@dataclass(frozen=True, slots=True)
class OutputArrived:
    """Bytes that a rank wrote to its standard output or error stream."""

    rank: int
    stream: str
    data: bytes


@dataclass(frozen=True, slots=True)
class EventsArrived:
    """Measurements that a rank recorded."""

    rank: int
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    """End of a rank's process; ``code`` is negative for a signal. ``reason`` is set when it could not be started.

    ``stack`` is the last Python stack of a process that crashed; ``killed_for`` states, after a SIGKILL, whether
    the system ran out of memory.
    """

    rank: int
    code: int
    reason: str = ""
    stack: str = ""
    killed_for: KillCause = "unknown"


@dataclass(frozen=True, slots=True)
class NodeLost:
    """The loss of a node with all workers on it; the engine reports no `WorkerEnded` for them and cannot replace them.

    ``reason`` states the node and what was observed, as in ``node 10.0.0.3 has not answered for 2.1 s``.
    """

    node: int
    ranks: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class ObservedState:
    """A rank as observed from outside: the letter of its process state as in ``ps``, and its Python stack.

    The rank writes its stack as soon as the system schedules it: ``read_stack`` returns the stack if it has been
    written by then.
    """

    rank: int
    state: str
    read_stack: Callable[[], str]


Arrival = RecordArrived | OutputArrived | EventsArrived | WorkerEnded | NodeLost | ObservedState


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """The latest known state of an engine."""

    is_warm: bool
    """Whether workers can be started without a wait for imports."""
    num_threads: int
    """The number of threads in the process that workers are forked from; 1 if workers are not forked."""
    variables: Mapping[str, str]
    """The notebook's environment variables that new workers get."""
    pids: Mapping[int, int]
    """Process ids of the workers by rank."""
    zygote_pid: int | None
    """The process that workers are forked from, if there is one on this machine."""
    nodes: tuple[str, ...] = ()
    """The names of the nodes by number; empty if all workers run on this machine."""
    lost_nodes: Mapping[int, str] = field(default_factory=dict[int, str])
    """The reason, by number, for each node that was lost."""
    resident_bytes: Mapping[int, int] = field(default_factory=dict[int, int])
    """The memory of workers on other machines, by rank."""
    machines: Mapping[int, Machine] = field(default_factory=dict[int, Machine])
    """The machines of nodes that are not lost as they were reported last, by number of the node."""


class Engine(Protocol):
    """Starts workers and moves records and payloads to and from them; independent of notebooks and cells."""

    @property
    def payloads(self) -> PayloadFactory:
        """The factory of payloads that `send` can send."""
        ...

    def facts(self) -> EngineFacts:
        """Return the latest known state without waiting; may be called in any thread."""
        ...

    def refresh(self) -> None:
        """Read what a starting engine has reported, without waiting."""
        ...

    def start(self, specs: Sequence[WorkerSpec]) -> None:
        """Start one worker for each spec in place of those that run; a `WorkerReady` record arrives from each."""
        ...

    def send(self, rank: int, record: object, payloads: Payloads = NO_PAYLOADS, *, urgent: bool = False) -> bool:
        """Send a record to a rank; return False if the rank has ended.

        An ``urgent`` record is handled even while the rank's main thread is busy. The caller closes the payloads.
        """
        ...

    def poll(self, timeout_s: float) -> list[Arrival]:
        """Return the arrivals, after a wait of at most ``timeout_s`` for the first one."""
        ...

    def kill(self, rank: int) -> None:
        """Kill a rank; a `WorkerEnded` arrives."""
        ...

    def replace(self, ranks: Sequence[int]) -> Payloads:
        """Start fresh workers in place of ended ones.

        Returns the payloads of the ``reopen`` request with which the other ranks join them in a new process group.
        The engine closes the payloads. Raise PoolError if a rank cannot be replaced, since its node is lost.
        """
        ...

    def stop(self) -> None:
        """End every process and release all resources; a second call does nothing."""
        ...


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """The arguments with which an engine is started."""

    program: str
    """The program of its workers, as ``module:attribute``."""
    preload: Sequence[str]
    """Modules and functions (``module:function``) to load before workers are started."""
    options: EngineOptions
    overrides: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables of the workers that replace the notebook's."""


EngineFunction = Callable[[EngineRequest], Engine]
"""Starts an engine; the value of an entry point in the group ``accel_nb.engines``."""
