"""Types of the JSON messages that the kernel sends to a panel in the browser.

The rows of curves are not JSON: they are one buffer of little-endian float64 numbers, sent with the message.
``ui.export`` generates the front end's types from these classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict

JsonNumber = float | Literal["nan", "inf", "-inf"] | None
"""A number in JSON, which has no NaN and no infinities."""

Status = Literal["running", "done", "failed", "interrupted"]
TableKind = Literal["step", "metric", "memory", "plan"]
CurveKind = Literal["step", "metric"]


class TimeShares(TypedDict):
    """The parts of a rank's time, from 0 to 1."""

    reading: float
    computing: float
    blocked: float
    """Waiting, mostly for other ranks."""
    queued: float
    """Waiting for a free processor."""


class RankFacts(TypedDict):
    """Figures of one rank."""

    rank: int
    device: str
    place: str
    """The rank's place in a mesh of several dimensions, as in "dp 1, tp 0"; empty if there is one dimension."""
    step_ms: JsonNumber
    is_straggler: bool
    time_use: TimeShares | None
    process_growth: JsonNumber
    """Bytes that a CPU worker's process has allocated since the first step, without parameters, gradients and state."""


class MetricFact(TypedDict):
    """The latest value of a metric."""

    name: str
    value: JsonNumber


class LoggedMetricFact(MetricFact):
    """The latest value of a metric that the user logs."""

    validates: str | None
    """The name of the loss of which it is the validation loss; null if of none."""


class ProgressFacts(TypedDict):
    """Progress of a run; 0 and null stand for unknown values."""

    epoch: int
    num_epochs: int
    batch_fraction: JsonNumber
    """The completed fraction of the epoch, from 0 to 1."""
    fraction: JsonNumber
    """The completed fraction of the run, from 0 to 1."""
    remaining_s: JsonNumber


class PanelFacts(TypedDict):
    """Figures of the panel's header."""

    title: str
    status: Status
    num_workers: int
    step: int
    loss: JsonNumber
    losses: Sequence[MetricFact]
    """The latest value of each loss, by the name of its curve."""
    learning_rate: JsonNumber
    samples_per_s: JsonNumber
    step_ms: JsonNumber
    elapsed_s: JsonNumber
    progress: ProgressFacts
    ranks: Sequence[RankFacts]
    metrics: Sequence[LoggedMetricFact]
    utilization: Sequence[str]
    """The names of the metric tables that show how much each rank computes: they are drawn in a group of their own."""
    notes: Sequence[str]
    accepts_actions: bool
    """Whether the kernel accepts actions from the panel's controls."""
    can_save: bool
    """Whether there is a folder for checkpoints."""
    action_result: str
    """The result of the last action that the user requested."""
    num_earlier: int
    """The number of runs to compare with."""


class BlockHeader(TypedDict):
    """One table in the message's buffer: tables are stored in the order of their headers, each column by column."""

    table: TableKind
    rank: int
    name: str
    rows: int


class EarlierRunFacts(TypedDict):
    """One run to compare with."""

    run: int
    title: str
    summary: str
