"""The records that workers send to the kernel; imports no torch.

Panel, sidebar, trackers and logs use the same records. Times are seconds since the epoch (``time.time()``), durations
are in seconds, memory is in bytes. ``EVENT_VERSION`` increases whenever a field changes.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol

from accel_nb.runtime.process.typed_records import build_record

EVENT_VERSION = 4


@dataclass(frozen=True, slots=True)
class StepDone:
    """One rank finished an optimizer step; ``loss`` is the mean over the rank's samples of the step.

    Steps are numbered from 1 in each run. ``curve`` is the name of the variable on which ``backward()`` was called,
    with a number appended if another optimizer's steps have that name already; empty for a loss without a variable.
    """

    kind: ClassVar[str] = "step"
    rank: int
    step: int
    time: float
    loss: float
    learning_rate: float
    step_s: float
    num_samples: int
    skipped: bool = False
    curve: str = ""


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Memory use of one rank's device (on the CPU: of its process), in bytes."""

    kind: ClassVar[str] = "memory"
    rank: int
    step: int
    time: float
    parameters: int
    gradients: int
    optimizer: int
    other: int
    cached: int
    free: int


@dataclass(frozen=True, slots=True)
class TimeUsed:
    """The time of one rank's training thread since its last such record, in seconds.

    ``blocked_s``: it waited, mostly for other ranks; ``queued_s``: it was ready, and no processor was free.
    """

    kind: ClassVar[str] = "time use"
    rank: int
    step: int
    time: float
    reading_s: float
    computing_s: float
    blocked_s: float
    queued_s: float


@dataclass(frozen=True, slots=True)
class DeviceLoad:
    """A value of a sensor of one rank's device; the name has the unit."""

    kind: ClassVar[str] = "device load"
    rank: int
    step: int
    time: float
    name: str
    value: float


@dataclass(frozen=True, slots=True)
class MetricLogged:
    """A value that the cell logged by name."""

    kind: ClassVar[str] = "metric"
    rank: int
    step: int
    time: float
    name: str
    value: float


@dataclass(frozen=True, slots=True)
class WorkerPrepared:
    """Device, strategy, precision and prepared objects of a worker, for the receipt.

    ``place`` is the rank's place in a mesh of several dimensions, as in "dp 1, tp 0"; empty if there is one dimension.
    """

    kind: ClassVar[str] = "prepared"
    rank: int
    time: float
    device: str
    strategy: str
    precision: str
    objects: tuple[str, ...]
    notes: tuple[str, ...]
    place: str = ""


@dataclass(frozen=True, slots=True)
class RankFailed:
    """A rank raised an exception, or its process ended."""

    kind: ClassVar[str] = "failed"
    rank: int
    time: float
    reason: str


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The user interrupted the run."""

    kind: ClassVar[str] = "interrupted"
    rank: int
    time: float


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """A checkpoint is complete; ``time`` is when the run was notified.

    Saving blocked the training for ``stall_s``; the files were durable after ``write_s``, measured from the same start.
    """

    kind: ClassVar[str] = "checkpoint"
    rank: int
    step: int
    time: float
    url: str
    stall_s: float
    write_s: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ControlApplied:
    """A control action of the user was carried out while the cell ran; ``text`` describes it."""

    kind: ClassVar[str] = "control"
    rank: int
    step: int
    time: float
    text: str


@dataclass(frozen=True, slots=True)
class EpochBegan:
    """A loop over a loader began after ``step``."""

    kind: ClassVar[str] = "epoch"
    rank: int
    step: int
    time: float
    num_steps: int
    """How many steps of an optimizer it is expected to have; 0 if the length is unknown."""
    loader: int = 0
    """The number of the loader, in the order in which loops over loaders began."""
    epoch: int = 0
    """How many epochs of the loader have ended in this run, with those of the checkpoint that it resumes from."""


@dataclass(frozen=True, slots=True)
class LearningRatePlan:
    """The planned learning rates of a schedule: ``rates`` at ``steps``, linear in between."""

    kind: ClassVar[str] = "rate plan"
    rank: int
    step: int
    time: float
    steps: tuple[int, ...]
    rates: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class MemorySnapshot:
    """Segments and blocks of the allocator of one rank's device, and the objects that use most memory, at one moment.

    Sizes are in bytes. ``blocks`` has four numbers for each block: segment, offset, size, state
    (`telemetry.allocator_blocks`). ``holder_bytes`` are the sizes of the objects that ``holders`` describes.
    """

    kind: ClassVar[str] = "memory snapshot"
    rank: int
    step: int
    time: float
    num_segments: int
    reserved: int
    in_use: int
    largest_free: int
    segments: tuple[int, ...]
    blocks: tuple[int, ...]
    holders: tuple[str, ...]
    holder_bytes: tuple[int, ...]


Event = (
    StepDone
    | MemorySample
    | TimeUsed
    | DeviceLoad
    | MetricLogged
    | WorkerPrepared
    | RankFailed
    | Interrupted
    | CheckpointSaved
    | ControlApplied
    | EpochBegan
    | LearningRatePlan
    | MemorySnapshot
)

_KINDS: dict[str, type[Event]] = {
    event.kind: event
    for event in (
        StepDone,
        MemorySample,
        TimeUsed,
        DeviceLoad,
        MetricLogged,
        WorkerPrepared,
        RankFailed,
        Interrupted,
        CheckpointSaved,
        ControlApplied,
        EpochBegan,
        LearningRatePlan,
        MemorySnapshot,
    )
}


def to_message(event: Event) -> dict[str, Any]:
    """Return the event as a JSON-ready dict with its kind and version."""
    return {"kind": event.kind, "version": EVENT_VERSION, **asdict(event)}


def from_message(message: dict[str, Any]) -> Event:
    """Return the event of a message; raises ValueError for an unknown kind or version, or wrong fields or types."""
    kind, version = message.get("kind"), message.get("version")
    cls = _KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None or version != EVENT_VERSION:
        raise ValueError(
            f"unknown event kind {str(kind)[:40]!r} version {str(version)[:40]!r}; "
            f"known: {sorted(_KINDS)}, {EVENT_VERSION}"
        )
    return build_record(cls, {name: value for name, value in message.items() if name not in ("kind", "version")})


class EventSink(Protocol):
    """Receives events; must never block and never raise."""

    def emit(self, event: Event) -> None:
        """Receive one event."""
        ...


class NullEventSink:
    """A sink that drops every event, for runs without a kernel."""

    def emit(self, event: Event) -> None:
        """Drop the event."""

    def emit_metric(self, rank: int, step: int, time: float, name: str, value: float) -> None:
        """Drop the value, without creating an event for it."""


current_sink: ContextVar[EventSink] = ContextVar("accel_nb_sink", default=NullEventSink())  # noqa: B039
"""The default sink of an Accelerator; the worker sets it around a cell."""
