"""Definitions of the exported metrics, and their values in an event. Independent of monitoring systems and of torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from accel_nb.telemetry.events import (
    CheckpointSaved,
    DeviceLoad,
    Event,
    Interrupted,
    MemorySample,
    MetricLogged,
    RankFailed,
    StepDone,
    TimeUsed,
    WorkerPrepared,
)


@dataclass(frozen=True, slots=True)
class Metric:
    """One exported metric: a counter only increases, a gauge is the newest value, a histogram is a distribution."""

    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ("rank",)
    unit: str = ""


METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        "accel_nb_steps": Metric(
            "counter", "Reports without a skipped step: one for each optimizer step, or for each reporting interval."
        ),
        "accel_nb_skipped_steps": Metric("counter", "Reports with a skipped step: gradients overflowed."),
        "accel_nb_samples": Metric("counter", "Samples that were trained on."),
        "accel_nb_step_time_seconds": Metric(
            "histogram", "Time of an optimizer step, the mean over the reporting interval.", unit="s"
        ),
        "accel_nb_step": Metric("gauge", "Number of the newest reported optimizer step."),
        "accel_nb_loss": Metric("gauge", "Loss of the newest report, the mean over the rank's samples."),
        "accel_nb_learning_rate": Metric("gauge", "Learning rate of the newest reported step."),
        "accel_nb_time_seconds": Metric(
            "counter",
            "Time of the rank's training thread by use (blocked: for other ranks; queued: for a free processor).",
            ("rank", "kind"),
            "s",
        ),
        "accel_nb_device_load": Metric("gauge", "Value of a sensor of the rank's device.", ("rank", "sensor")),
        "accel_nb_memory_bytes": Metric("gauge", "Memory of the rank's device by use.", ("rank", "kind"), "By"),
        "accel_nb_logged": Metric("gauge", "Newest value that the cell logged by name.", ("rank", "name")),
        "accel_nb_worker": Metric(
            "gauge", "1 for the rank's device, strategy and precision.", ("rank", "device", "strategy", "precision")
        ),
        "accel_nb_failures": Metric("counter", "Ranks that raised an exception or whose process ended."),
        "accel_nb_interrupts": Metric("counter", "Interrupts by the user."),
        "accel_nb_checkpoints": Metric("counter", "Checkpoints that are complete.", ()),
        "accel_nb_checkpoint_step": Metric("gauge", "Step of the newest checkpoint.", ()),
        "accel_nb_checkpoint_bytes": Metric("gauge", "Size of the newest checkpoint.", (), "By"),
        "accel_nb_checkpoint_stall_seconds": Metric(
            "gauge", "Time for which the newest checkpoint blocked the training.", (), "s"
        ),
        "accel_nb_checkpoint_write_seconds": Metric("gauge", "Time until the newest checkpoint was durable.", (), "s"),
    }
)

MAX_NAMES = 200
"""Maximum number of exported logged names: each is a separate time series."""


@dataclass(frozen=True, slots=True)
class MetricValue:
    """One value of a metric, with labels in the metric's order. A counter increases by the value."""

    name: str
    labels: tuple[str, ...]
    value: float


_TIME = ("reading", "computing", "blocked", "queued")
_MEMORY = ("parameters", "gradients", "optimizer", "other", "cached", "free")


def metric_values(event: Event) -> Iterator[MetricValue]:
    """Yield the metric values of one event."""
    rank = (str(event.rank),)
    match event:
        case StepDone():
            yield MetricValue("accel_nb_skipped_steps" if event.skipped else "accel_nb_steps", rank, 1)
            yield MetricValue("accel_nb_samples", rank, event.num_samples)
            yield MetricValue("accel_nb_step_time_seconds", rank, event.step_s)
            yield MetricValue("accel_nb_step", rank, event.step)
            yield MetricValue("accel_nb_loss", rank, event.loss)
            yield MetricValue("accel_nb_learning_rate", rank, event.learning_rate)
        case MemorySample():
            for kind in _MEMORY:
                yield MetricValue("accel_nb_memory_bytes", (*rank, kind), getattr(event, kind))
        case TimeUsed():
            parts = event.reading_s, event.computing_s, event.blocked_s, event.queued_s
            for kind, seconds in zip(_TIME, parts, strict=True):
                yield MetricValue("accel_nb_time_seconds", (*rank, kind), seconds)
        case DeviceLoad():
            yield MetricValue("accel_nb_device_load", (*rank, event.name), event.value)
        case MetricLogged():
            yield MetricValue("accel_nb_logged", (*rank, event.name), event.value)
        case WorkerPrepared():
            yield MetricValue("accel_nb_worker", (*rank, event.device, event.strategy, event.precision), 1)
        case RankFailed():
            yield MetricValue("accel_nb_failures", rank, 1)
        case Interrupted():
            yield MetricValue("accel_nb_interrupts", rank, 1)
        case CheckpointSaved():
            yield MetricValue("accel_nb_checkpoints", (), 1)
            yield MetricValue("accel_nb_checkpoint_step", (), event.step)
            yield MetricValue("accel_nb_checkpoint_bytes", (), event.num_bytes)
            yield MetricValue("accel_nb_checkpoint_stall_seconds", (), event.stall_s)
            yield MetricValue("accel_nb_checkpoint_write_seconds", (), event.write_s)
        case _:  # events without metrics
            return
