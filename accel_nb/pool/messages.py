"""The messages between kernel, zygote and workers, as typed records with one encoding.

- kernel -> zygote: `Fork`, `Kill`, `TraceStack`
- zygote -> kernel: `ZygoteReady`, `Forked`, `ForkFailed`, `Exited`, `StackTraced`
- kernel -> worker: `TaskRequest`
- worker -> kernel: `WorkerReady`, `RankMessage`, `Reply`, `ActionDone`
- kernel -> monitor thread of a worker: `FinishStep`, `ProposeAction`, `DecideAction`, `Interrupt`, `AbortCollective`,
  `QueryLocation`
- monitor thread -> kernel: `FinishAnswer`, `StepCount`, `Stopped`, `LocationReport`
- user code -> kernel: `InterruptReport`, wherever the main thread is

The monitor thread has a separate channel, which it reads even while the main thread of the worker is busy.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, ClassVar, Literal

from accel_nb.pool.channel import ChannelError, Message
from accel_nb.runtime.process.typed_records import build_record, field_types

Outcome = Literal["done", "raised", "interrupted"]


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """The settings of a new worker; part of `Fork`."""

    rank: int
    size: int
    device: str
    num_threads: int
    program: str
    cwd: str
    sys_path: list[str]
    timeout_s: float
    node: int
    local_rank: int
    local_size: int
    address: str
    interface: str


@dataclass(frozen=True, slots=True)
class Fork:
    """Fork one worker; the descriptors are control, monitor, stdout, stderr, ring, store and trace."""

    kind: ClassVar[str] = "fork"
    rank: int
    start: WorkerStart


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill one worker and the processes that it started, at once."""

    kind: ClassVar[str] = "kill"
    rank: int


@dataclass(frozen=True, slots=True)
class TraceStack:
    """Make a worker write its Python stack, even while native code holds the GIL, and report its process state."""

    kind: ClassVar[str] = "trace"
    rank: int


@dataclass(frozen=True, slots=True)
class StackTraced:
    """The letter of a worker's process state as in ``ps``: ``T`` is stopped, ``R`` running, ``S`` sleeping."""

    kind: ClassVar[str] = "traced"
    rank: int
    state: str


@dataclass(frozen=True, slots=True)
class ZygoteReady:
    """The zygote has imported all modules and can fork; ``num_threads`` must be 1 for this to be safe."""

    kind: ClassVar[str] = "zygote_ready"
    pid: int
    num_threads: int


@dataclass(frozen=True, slots=True)
class Forked:
    """A worker was forked."""

    kind: ClassVar[str] = "forked"
    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class ForkFailed:
    """The operating system could not create the process of a worker."""

    kind: ClassVar[str] = "fork_failed"
    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class Exited:
    """A worker ended; ``code`` as in `subprocess`: negative is a signal."""

    kind: ClassVar[str] = "exited"
    rank: int
    pid: int
    code: int


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker is ready for requests."""

    kind: ClassVar[str] = "worker_ready"
    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class TaskRequest:
    """Run ``task`` and send a `Reply` of the same number; the program defines the body."""

    kind: ClassVar[str] = "request"
    number: int
    task: str
    body: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FinishStep:
    """If request ``number`` still runs: end it at the next point where no progress is lost; send a `FinishAnswer`."""

    kind: ClassVar[str] = "finish"
    number: int


@dataclass(frozen=True, slots=True)
class FinishAnswer:
    """The answer to `FinishStep`: whether the rank will end its request at such a point."""

    kind: ClassVar[str] = "finish_answer"
    number: int
    will_end: bool


@dataclass(frozen=True, slots=True)
class ProposeAction:
    """If request ``number`` still runs: wait at the next end of a step for the `DecideAction` of this ``action_id``."""

    kind: ClassVar[str] = "propose_action"
    number: int
    action_id: int
    action: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StepCount:
    """The answer to `ProposeAction`: how many ends of steps the rank has counted; None if its task has no steps now."""

    kind: ClassVar[str] = "step_count"
    number: int
    action_id: int
    count: int | None


@dataclass(frozen=True, slots=True)
class DecideAction:
    """Continue, and do the proposed action when ``count`` ends of steps are counted; None: do not do it."""

    kind: ClassVar[str] = "decide_action"
    number: int
    action_id: int
    count: int | None


@dataclass(frozen=True, slots=True)
class ActionDone:
    """A rank has performed an action after ``step``; ``text`` describes the outcome."""

    kind: ClassVar[str] = "action_done"
    number: int
    action_id: int
    step: int
    text: str


@dataclass(frozen=True, slots=True)
class Interrupt:
    """If request ``number`` still runs: raise KeyboardInterrupt in it."""

    kind: ClassVar[str] = "interrupt"
    number: int


@dataclass(frozen=True, slots=True)
class InterruptReport:
    """After an interrupt: whether the user code has got it.

    ``is_raised``: KeyboardInterrupt was raised in the user code of the request, which may handle it and go on. False:
    the interpreter has ignored it, as it does with errors in destructors.
    """

    kind: ClassVar[str] = "interrupt_report"
    number: int
    is_raised: bool


@dataclass(frozen=True, slots=True)
class Stopped:
    """After an interrupt: the user code of the request has ended on this rank."""

    kind: ClassVar[str] = "stopped"
    number: int


@dataclass(frozen=True, slots=True)
class AbortCollective:
    """If request ``number`` still runs: end the collective that blocks it."""

    kind: ClassVar[str] = "abort_collective"
    number: int


@dataclass(frozen=True, slots=True)
class QueryLocation:
    """Send a `LocationReport` about request ``number``.

    ``from_outside``: the rank has not answered an earlier query, so the zygote also reads its stack and state.
    """

    kind: ClassVar[str] = "query_location"
    number: int
    from_outside: bool = False


@dataclass(frozen=True, slots=True)
class RankLocation:
    """The line that a rank's main thread runs, and the last collective that it has entered."""

    file: str
    line: int | None
    text: str
    is_waiting: bool
    """Whether the thread is inside of a collective or a backward pass."""
    group: str | None
    """The process group of the collective; None, as are the next four fields, if torch has not recorded one."""
    channel: str | None
    """The key in ``entered`` under which the collective is counted: its group, or the exchange through memory."""
    sequence: int | None
    operation: str | None
    sizes: list[Any] | None
    is_open: bool
    """Whether the collective has not completed."""
    includes_all_ranks: bool
    """Whether all ranks take part in it."""
    entered: dict[str, int]
    """How many collectives of each group the rank has entered; the exchange through memory counts as a group."""
    has_ended: bool
    """Whether the request has ended on this rank."""


@dataclass(frozen=True, slots=True)
class LocationReport:
    """The answer to `QueryLocation`."""

    kind: ClassVar[str] = "location_report"
    number: int
    location: RankLocation


@dataclass(frozen=True, slots=True)
class RankMessage:
    """A message of a rank while a request runs, such as a display or a log record; the program defines topic and body.

    ``mark`` is the number of the mark that the rank has written into its output before; 0 for none.
    """

    kind: ClassVar[str] = "rank_message"
    number: int
    topic: str
    body: dict[str, Any]
    mark: int = 0


@dataclass(frozen=True, slots=True)
class Reply:
    """The end of a request on one rank; the program defines the body.

    ``interrupted_exchange``: the request ended in the middle of an exchange with other ranks.
    """

    kind: ClassVar[str] = "reply"
    number: int
    outcome: Outcome
    body: dict[str, Any]
    interrupted_exchange: bool = False


_RECORDS: dict[str, type] = {
    record.kind: record
    for record in (
        Fork,
        Kill,
        TraceStack,
        StackTraced,
        ZygoteReady,
        Forked,
        ForkFailed,
        Exited,
        WorkerReady,
        TaskRequest,
        FinishStep,
        FinishAnswer,
        ProposeAction,
        StepCount,
        DecideAction,
        ActionDone,
        Interrupt,
        InterruptReport,
        Stopped,
        AbortCollective,
        QueryLocation,
        LocationReport,
        RankMessage,
        Reply,
    )
}


def read_types() -> None:
    """Resolve and cache the field types of all records; processes that are forked later share the cache."""
    for record in (*_RECORDS.values(), WorkerStart, RankLocation):
        field_types(record)


def encode(record: Any) -> Message:
    """Return the record as a message."""
    values = {item.name: getattr(record, item.name) for item in fields(record)}
    return {"kind": record.kind} | {
        name: asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
        for name, value in values.items()
    }


def decode(message: Message) -> Any:
    """Return the record of a message; raise ChannelError if the kind, a field or a type is not valid."""
    record = _RECORDS.get(message["kind"])
    if record is None:
        raise ChannelError(f"unknown message kind {message['kind'][:40]!r}; known: {sorted(_RECORDS)}")
    try:
        return build_record(record, {name: value for name, value in message.items() if name != "kind"})
    except ValueError as error:
        raise ChannelError(f"a {message['kind']!r} message is wrong: {error}") from None
