"""The requests of the kernel to the program that runs in its workers, and the replies, as typed records.

The pool transfers them as plain dicts, which `to_body` creates and the receiver validates.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from accel_nb.errors import PoolError
from accel_nb.pool.control.stop_escalation import Outcome, RankResult, WorkerDeath
from accel_nb.pool.payload import Payloads
from accel_nb.pool.sync.result_transfer import ReturnRecord
from accel_nb.runtime.process.typed_records import build_record
from accel_nb.telemetry.out_of_memory import OutOfMemoryReport

ReloadMode = Literal["again", "update", "edited"]
"""How a module is reloaded.

``again``: as by `importlib.reload`. ``update``: as by IPython's autoreload, which also updates the functions and
classes that other modules imported from it. ``edited``: its file has changed; as ``update``, and modules
that import it are reloaded too.
"""


@dataclass(frozen=True, slots=True)
class SentModule:
    """The source of one of the user's own modules, for a worker on another machine, or that no import finds."""

    name: str
    file: str
    """Its path on the notebook's machine."""
    text: str
    is_package: bool
    mtime_ns: int
    size: int
    """Modification time, in nanoseconds, and size of the file, in bytes."""


@dataclass(frozen=True, slots=True)
class CallRequest:
    """A function that runs in place of a cell's source."""

    bound_name: str
    """The name that the function is bound to."""
    variables: dict[str, str]
    """Environment variables during the call."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    """Run a cell or a call; the values that it needs come as payloads. An empty plain cell has the defaults."""

    source: str
    config: str
    """The options, as JSON."""
    cwd: str
    sys_path: tuple[str, ...]
    shell_name: str = ""
    """The name of the class of the notebook's shell; empty outside of one."""
    compiler_flags: int = 0
    execution_count: int = 0
    used: tuple[str, ...] = ()
    """The names that the cell reads."""
    bound: tuple[str, ...] = ()
    """The names that the cell binds."""
    contained: tuple[str, ...] = ()
    """Those of ``bound`` whose present values are contained in values of other names, which the cell does not bind."""
    assigned: tuple[str, ...] = ()
    """The attributes of imported modules and classes that it may set, as `AssignedAttribute.to_text` returns them."""
    submodules: tuple[str, ...] = ()
    """The modules to import that the cell uses as attributes of their packages."""
    shared: tuple[str, ...] = ()
    """The names whose values both the kernel and the worker have."""
    is_plain: bool = True
    only_reads_accelerator: bool = True
    """The cell is plain, unless an earlier one has prepared objects explicitly."""
    uses_accelerator: bool = False
    may_depend_on_rank: bool = False
    is_empty: bool = False
    call: CallRequest | None = None
    sources: dict[str, Any] = field(default_factory=dict)
    """Source and name of the notebook's cells by file name, for tracebacks."""
    variables: dict[str, str | None] = field(default_factory=dict)
    """The notebook's changes of environment variables; None: deleted."""
    settings: dict[str, Any] = field(default_factory=dict)
    modules: tuple[SentModule, ...] = ()
    """The modules that workers would not find, or have in an older version."""
    reloaded: dict[str, ReloadMode] = field(default_factory=dict)
    """The modules to reload."""
    lines: tuple[str, ...] = ()
    """Lines of the kernel to show below the output; rank 0 returns them before its own."""
    entropy: int = 0
    """A random number of this request, from which the ranks derive the seeds of unseeded generators."""
    rng_digest: str | None = None
    """The digest of the kernel's random states; None: the worker does not return its own."""
    is_on_some_ranks: bool = False
    """Whether the cell runs on some ranks only."""
    first_rank: int = 0
    """The lowest of the ranks that run the cell."""
    has_lost_ranks: bool = False
    """Whether ranks were replaced since the last cell."""
    follows_failure: bool = False
    """Whether the last cell has ended with an error or an interrupt on some rank, or its end is not known."""
    is_idle: bool = False
    """Whether this rank only receives the values, and does not run the cell."""


@dataclass(frozen=True, slots=True)
class PullRequest:
    """Return values by name, whatever their size."""

    names: tuple[str, ...]
    shared: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """An error that a rank raised."""

    type: str
    module: str
    message: str
    traceback: tuple[str, ...]
    pickled: str | None
    """The pickled error in base64; None if it cannot be pickled."""


@dataclass(frozen=True, slots=True)
class TaskReply:
    """The reply of one rank to a task, beside the payloads."""

    has_run: bool = True
    """Whether the values of the request have arrived and its code was started."""
    was_idle: bool = False
    was_interrupted: bool = False
    """Whether the code has handled an interrupt: the ranks may have got it after different steps."""
    error: ErrorReport | None = None
    memory: OutOfMemoryReport | None = None
    fingerprints: tuple[Any, ...] | None = None
    """Digests of the trained weights."""
    values: dict[str, int] = field(default_factory=dict)
    """Digests of plain values of a plain cell, by name."""
    lines: tuple[str, ...] = ()
    """Lines to show below the output."""
    modules: dict[str, Any] = field(default_factory=dict)
    """Modules that were imported, with the stamps of their files."""
    returned: ReturnRecord | None = None
    references: dict[str, Any] = field(default_factory=dict)
    """For names whose values stay on the workers: the names to which their code refers."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The settings of the process that the cell has changed."""

    def to_body(self) -> dict[str, Any]:
        """Return the reply as a JSON-ready dict."""
        body = to_body(self)
        body["returned"] = None if self.returned is None else self.returned.to_body()
        return body


@dataclass(frozen=True, slots=True)
class RankAnswer:
    """The outcome of a request on one rank. The receiver must close the payloads."""

    rank: int
    outcome: Outcome
    reply: TaskReply = TaskReply()
    death: WorkerDeath | None = None
    """How the process died, if it did."""
    payloads: Payloads = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether the rank has run all of the code, without an interrupt."""
        return self.outcome == "done" and not self.reply.was_interrupted


def to_body(record: RunRequest | PullRequest | TaskReply) -> dict[str, Any]:
    """Return a record as a JSON-ready dict; lists and dicts in it are not copied."""
    values = {item.name: getattr(record, item.name) for item in fields(record)}
    nested = (CallRequest, ErrorReport, OutOfMemoryReport)
    body = {name: asdict(value) if isinstance(value, nested) else value for name, value in values.items()}
    if isinstance(record, RunRequest):
        body["modules"] = [asdict(module) for module in record.modules]
    return body


def read_answer(result: RankResult) -> RankAnswer:
    """Return a rank's result with its reply validated; raises PoolError for a reply with other fields or types."""
    if result.death is not None:
        return RankAnswer(result.rank, result.outcome, death=result.death)
    try:
        reply = build_record(TaskReply, result.body)
    except ValueError as error:
        raise PoolError(f"rank {result.rank} sent a wrong reply: {error}") from None
    return RankAnswer(result.rank, result.outcome, reply, payloads=result.payloads)
