"""The closed set of records that a run emits; plain data, no torch.

The same records feed the panel, the sidebar, trackers and logs. Times are seconds since the epoch
(``time.time()``), durations are seconds, memory is in bytes. ``EVENT_VERSION`` changes when a field does.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol

from accel_nb.runtime.process.typed_records import build

EVENT_VERSION = 2


@dataclass(frozen=True, slots=True)
class StepDone:
    """One optimizer step finished on one rank; ``loss`` is the mean over the step's own samples."""

    kind: ClassVar[str] = "step"
    rank: int
    step: int
    time: float
    loss: float
    learning_rate: float
    step_s: float
    num_samples: int
    skipped: bool = False


@dataclass(frozen=True, slots=True)
class MemorySample:
    """What fills one rank's device (on CPU: its process), in bytes."""

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
class MetricLogged:
    """A value that the cell logged by name."""

    kind: ClassVar[str] = "metric"
    rank: int
    step: int
    time: float
    name: str
    value: float


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a worker runs with, as it reports it itself; the receipt is made of these."""

    kind: ClassVar[str] = "prepared"
    rank: int
    time: float
    device: str
    strategy: str
    precision: str
    objects: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RankFailed:
    """A rank raised or died."""

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
    """A checkpoint is complete; ``time`` is when the run learned of it.

    It held the training up for ``stall_s``, and was durable after ``write_s``, counted from the same moment.
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
class Steered:
    """Something was done that the user had asked for while the cell ran; ``text`` says what."""

    kind: ClassVar[str] = "steered"
    rank: int
    step: int
    time: float
    text: str


@dataclass(frozen=True, slots=True)
class RatePlanned:
    """The learning rate that a schedule is going to give, ``rates`` at ``steps``; between them it goes straight."""

    kind: ClassVar[str] = "rate plan"
    rank: int
    step: int
    time: float
    steps: tuple[int, ...]
    rates: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class MemoryMapped:
    """What the allocator of one rank's device has cut its memory into, and who holds most of it, at one moment.

    Sizes are in bytes. ``blocks`` are four numbers each: segment, offset, size, state (`telemetry.allocator_blocks`).
    """

    kind: ClassVar[str] = "memory map"
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
    held: tuple[int, ...]


Event = (
    StepDone
    | MemorySample
    | MetricLogged
    | Prepared
    | RankFailed
    | Interrupted
    | CheckpointSaved
    | Steered
    | RatePlanned
    | MemoryMapped
)

_KINDS: dict[str, type[Event]] = {
    event.kind: event
    for event in (
        StepDone,
        MemorySample,
        MetricLogged,
        Prepared,
        RankFailed,
        Interrupted,
        CheckpointSaved,
        Steered,
        RatePlanned,
        MemoryMapped,
    )
}


def to_message(event: Event) -> dict[str, Any]:
    """Return the event as a JSON-ready dict with its kind and version."""
    return {"kind": event.kind, "version": EVENT_VERSION, **asdict(event)}


def from_message(message: dict[str, Any]) -> Event:
    """Rebuild an event; raises ValueError for an unknown kind or version, and other fields or types."""
    kind, version = message.get("kind"), message.get("version")
    cls = _KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None or version != EVENT_VERSION:
        raise ValueError(
            f"unknown event kind {str(kind)[:40]!r} version {str(version)[:40]!r}; "
            f"known: {sorted(_KINDS)}, {EVENT_VERSION}"
        )
    return build(cls, {name: value for name, value in message.items() if name not in ("kind", "version")})


class Sink(Protocol):
    """Takes events; must never block and never raise."""

    def emit(self, event: Event) -> None:
        """Take one event."""
        ...


class NullSink:
    """Drops every event: what a run without a listener uses."""

    def emit(self, event: Event) -> None:
        """Drop the event."""

    def emit_metric(self, rank: int, step: int, time: float, name: str, value: float) -> None:
        """Drop the value: nobody is to make an event of it first."""


current_sink: ContextVar[Sink] = ContextVar("accel_nb_sink", default=NullSink())  # noqa: B039
"""Where an Accelerator that is built without a sink of its own reports to; the worker sets it around a cell."""
