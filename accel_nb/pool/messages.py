"""Every message that kernel, zygote and workers exchange, as typed records with one encoding.

kernel -> zygote: `Fork`, `Kill`, `Trace`.   zygote -> kernel: `ZygoteReady`, `Forked`, `ForkFailed`, `Exited`,
                                                               `Traced`.
kernel -> worker: `Request`.                 worker -> kernel: `WorkerReady`, `Note`, `Reply`.
kernel -> worker's monitor thread: `Finish`, `Steer`, `Decide`, `Interrupt`, `Cut`, `Look` (it reads a channel of its
own, also while the worker is busy).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

from accel_nb.pool.channel import ChannelError, Message
from accel_nb.runtime.process.typed_records import build, hints_of

STOPPED = "stopped"
"""Topic of the `Note` with which a rank says, after an interrupt, that user code has ended."""

FINISHING = "finishing"
"""Topic of the `Note` that answers `Finish`: ``will`` says whether the rank is about to come to a good place."""
STEERING = "steering"
"""Topic of the `Note` that answers `Steer`: ``at`` is how many steps the rank has counted, None if it is in none."""
STEERED = "steered"
"""Topic of the `Note` with which a rank says after which ``step`` something was done, and in ``text`` what."""
PLACE = "place"
"""Topic of the `Note` with which a rank answers a `Look`."""

Outcome = Literal["done", "raised", "interrupted"]


@dataclass(frozen=True, slots=True)
class Fork:
    """Fork one worker; the descriptors are control, monitor, stdout, stderr, ring, store and trace."""

    kind: ClassVar[str] = "fork"
    rank: int
    start: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Start:
    """What a new worker needs to know; the body of `Fork`."""

    rank: int
    size: int
    device: str
    num_threads: int
    program: str
    cwd: str
    sys_path: list[str]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Kill:
    """End one worker and what it started, at once."""

    kind: ClassVar[str] = "kill"
    rank: int


@dataclass(frozen=True, slots=True)
class Trace:
    """Have a worker write its Python stack, whatever holds its interpreter lock, and say what state it is in."""

    kind: ClassVar[str] = "trace"
    rank: int


@dataclass(frozen=True, slots=True)
class Traced:
    """The system's letter for a worker's state: ``T`` is stopped, ``R`` runs, ``S`` sleeps."""

    kind: ClassVar[str] = "traced"
    rank: int
    state: str


@dataclass(frozen=True, slots=True)
class ZygoteReady:
    """The zygote has imported everything and can fork; safely so with one thread only."""

    kind: ClassVar[str] = "zygote_ready"
    pid: int
    import_s: float
    num_threads: int


@dataclass(frozen=True, slots=True)
class Forked:
    """A worker exists."""

    kind: ClassVar[str] = "forked"
    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class ForkFailed:
    """The system refused to make a worker."""

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
    """A worker takes requests."""

    kind: ClassVar[str] = "worker_ready"
    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class Request:
    """Do ``task`` and answer with a `Reply` of the same number; descriptors belong to the task."""

    kind: ClassVar[str] = "request"
    number: int
    task: str
    body: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Finish:
    """If request ``number`` is still running: end it at the next place where nothing is lost; say if there is one."""

    kind: ClassVar[str] = "finish"
    number: int


@dataclass(frozen=True, slots=True)
class Steer:
    """If request ``number`` is still running: wait at the next end of a step for the `Decide` of the same ``wish``."""

    kind: ClassVar[str] = "steer"
    number: int
    wish: int
    action: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Decide:
    """Go on, and do what was proposed when ``at`` steps are counted; None: do not do it."""

    kind: ClassVar[str] = "decide"
    number: int
    wish: int
    at: int | None


@dataclass(frozen=True, slots=True)
class Interrupt:
    """If request ``number`` is still running: raise KeyboardInterrupt in it."""

    kind: ClassVar[str] = "interrupt"
    number: int


@dataclass(frozen=True, slots=True)
class Cut:
    """If request ``number`` is still running: end the collective that it waits in."""

    kind: ClassVar[str] = "cut"
    number: int


@dataclass(frozen=True, slots=True)
class Look:
    """If request ``number`` is still running: say where it is. ``from_outside``: the rank has not answered before."""

    kind: ClassVar[str] = "look"
    number: int
    from_outside: bool = False


@dataclass(frozen=True, slots=True)
class Note:
    """Something to show or count while a request runs."""

    kind: ClassVar[str] = "note"
    number: int
    topic: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """The end of a request on one rank."""

    kind: ClassVar[str] = "reply"
    number: int
    outcome: Outcome
    body: dict[str, Any]


_RECORDS: dict[str, type] = {
    record.kind: record
    for record in (
        Fork,
        Kill,
        Trace,
        Traced,
        ZygoteReady,
        Forked,
        ForkFailed,
        Exited,
        WorkerReady,
        Request,
        Finish,
        Steer,
        Decide,
        Interrupt,
        Cut,
        Look,
        Note,
        Reply,
    )
}


def read_types() -> None:
    """Look up the types of all records' fields now: processes that are forked later share what is found."""
    for record in _RECORDS.values():
        hints_of(record)


def encode(record: Any) -> Message:
    """Return the record as a message."""
    return {"kind": record.kind, **{item.name: getattr(record, item.name) for item in fields(record)}}


def decode(message: Message) -> Any:
    """Return the record of a message; raises ChannelError for an unknown kind, other fields or other types."""
    record = _RECORDS.get(message["kind"])
    if record is None:
        raise ChannelError(f"unknown message kind {message['kind'][:40]!r}; known: {sorted(_RECORDS)}")
    try:
        return build(record, {name: value for name, value in message.items() if name != "kind"})
    except ValueError as error:
        raise ChannelError(f"a {message['kind']!r} message is wrong: {error}") from None
