"""State of a panel, computed from events. Draws nothing and imports no torch."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from accel_nb.telemetry.allocator_blocks import MAX_BLOCKS, MAX_SEGMENTS
from accel_nb.telemetry.events import (
    CheckpointSaved,
    ControlApplied,
    DeviceLoad,
    EpochBegan,
    Event,
    Interrupted,
    LearningRatePlan,
    MemorySample,
    MemorySnapshot,
    MetricLogged,
    RankFailed,
    StepDone,
    TimeUsed,
    WorkerPrepared,
)
from accel_nb.telemetry.validation_names import find_training_loss
from accel_nb.ui.marks import Marks
from accel_nb.ui.message_values import cap_text, to_json_number
from accel_nb.ui.messages import PanelFacts, ProgressFacts, Status
from accel_nb.ui.panel_tables import STEP_COLUMNS, PanelTables
from accel_nb.ui.progress import LoopPlan, Progress
from accel_nb.ui.rank_progress import ProgressByRank, RankProgress, throughput_of_run
from accel_nb.ui.series_table import MAX_ROWS, Table
from accel_nb.ui.time_use import TimeUse

MAX_PRINTED = 16_000
"""The number of characters of a cell's printed text that are kept for reloaded pages."""
MAX_METRICS = 32
MAX_SENSORS = 8
MAX_CURVES = 32
"""The maximum number of losses that have a curve of their own; further ones continue the last."""
MAX_PLANS = 8
MAX_PLAN_ROWS = 4000
MAX_SNAPSHOTS = 8
"""The maximum number of ranks whose memory snapshot is kept: as many as the panel draws."""
MAX_HOLDERS = 16
COMPUTING = "computing (%)"
"""The table of the share of time in which a rank's training thread computes."""
NAN_STEPS = 64


class PanelState:
    """State of one panel, a pure function of the events so far."""

    def __init__(self, title: str, num_workers: int, *, max_rows: int = MAX_ROWS, plan: LoopPlan | None = None) -> None:
        self.title = cap_text(title)
        self.num_workers = num_workers
        self.status: Status = "running"
        self.tables = PanelTables(num_workers, max_rows)
        self.marks = Marks()
        self.ranks = ProgressByRank()
        self.num_dropped = 0
        self.num_skipped = 0
        self.num_nan = 0
        # The names of the losses' curves, in the order in which they began; a loss without a variable has the name "".
        self.loss_names: list[str] = []
        self.failures: dict[int, str] = {}
        # Whether actions are accepted, whether there is a checkpoint folder, and the result of the last action.
        self.accepts_actions = False
        self.can_save = False
        self.action_result = ""
        self._is_result_final = True
        # Returns code, options and environment of the run, for the HTML file that users share.
        self.describe: Callable[[], Mapping[str, str]] = dict
        # The end of the cell's printed text.
        self.text = ""
        # The latest memory snapshot of each rank, and the number of snapshots that have arrived.
        self.snapshots: dict[int, MemorySnapshot] = {}
        self.num_snapshots = 0
        # The number of runs to compare with.
        self.num_earlier = 0
        self.metrics: dict[str, float] = {}
        self._nan_at: deque[float] = deque(maxlen=NAN_STEPS)
        self._start = math.nan
        self._progress = Progress(plan)
        self._time_use = TimeUse()
        self._utilization: list[str] = []

    @property
    def progress(self) -> ProgressFacts:
        """The run's epoch, its completed fraction and the remaining time."""
        return self._progress.facts(
            self.last_step, self.ranks.elapsed_s, len(self.loss_names), is_over=self.status != "running"
        )

    @property
    def has_data(self) -> bool:
        """Whether a step or a metric has been reported, which the panel can draw."""
        return any(table == "step" or table == "metric" for table, _, _ in self.tables)

    @property
    def last_step(self) -> int:
        """The last step on the horizontal axis that all ranks have reported, as the losses of the header have."""
        means = (self.tables.mean("step", name) for name in self.loss_names)
        return int(max((mean.columns[0][-1] for mean in means if mean is not None), default=0))

    def apply(self, events: Iterable[Event]) -> None:
        """Update the state by events; malformed ones are counted and dropped."""
        for event in events:
            try:
                self._apply_one(event)
            except (TypeError, ValueError, OverflowError, AttributeError):
                self.num_dropped += 1

    def add_text(self, text: str) -> None:
        """Append text that the cell has printed; only the last `MAX_PRINTED` characters are kept."""
        self.text = (self.text + text)[-MAX_PRINTED:]

    def set_action_result(self, text: str, *, is_final: bool = True) -> None:
        """Set the result of the user's last action to the first line of ``text``; a final result may follow others."""
        self.action_result = cap_text(next(iter(text.splitlines()), ""))
        self._is_result_final = is_final

    def finish(self, status: Status) -> None:
        """Set the final status; no more events follow."""
        self.status = status
        self._time_use.is_over = True
        self.accepts_actions = False
        if not self._is_result_final:
            self.set_action_result(
                "interrupted" if status == "interrupted" else f"not completed: {self.action_result.rstrip('. ')}"
            )
        self.tables.finish_means()
        for rank, progress in self.ranks.items():
            progress.final = throughput_of_run(self.tables.of_rank("step", rank)) or progress.throughput

    def curve(self, name: str = "loss") -> Table | None:
        """Return the table of a step value or metric: the mean over ranks, or the only rank's.

        With several losses, a step value such as the learning rate is read from the first one's table.
        """
        if name not in STEP_COLUMNS:
            return self.tables.mean("step", name) if name in self.loss_names else self.tables.mean("metric", name)
        return next((self.tables.mean("step", loss) for loss in self.loss_names), None)

    def validation_losses(self, loss: str) -> dict[str, Table]:
        """Return the tables of the validation losses of a loss, by the names of the metrics."""
        names = [name for name in self.metrics if find_training_loss(name, self.loss_names) == loss]
        return {name: table for name in names if (table := self.tables.mean("metric", name)) is not None}

    def straggler(self) -> int | None:
        """Return the rank that others wait for, or whose step takes clearly longer; None if there is none."""
        waited_for = self._time_use.straggler()
        return self.ranks.slowest() if waited_for is None else waited_for

    def facts(self) -> PanelFacts:
        """Return the header's figures, ready for JSON."""
        straggler = self.straggler()
        return {
            "title": self.title,
            "status": self.status,
            "num_workers": self.num_workers,
            "step": self.last_step,
            "loss": to_json_number(self._last_value("loss")),
            "losses": [
                {"name": name or "loss", "value": to_json_number(table.columns[1][-1])}
                for name in self.loss_names
                if (table := self.tables.mean("step", name)) is not None
            ],
            "learning_rate": to_json_number(self._last_value("learning rate")),
            "samples_per_s": to_json_number(self.ranks.samples_per_s),
            "step_ms": to_json_number(self.ranks.step_ms),
            "elapsed_s": to_json_number(self.ranks.elapsed_s),
            "progress": self.progress,
            "ranks": [
                {
                    "rank": rank,
                    "device": progress.device,
                    "place": progress.place,
                    "step_ms": to_json_number(progress.throughput.step_ms),
                    "is_straggler": rank == straggler,
                    "time_use": self._time_use.shares(rank),
                    "process_growth": to_json_number(progress.process_growth),
                }
                for rank, progress in sorted(self.ranks.items())
            ],
            "metrics": [
                {"name": name, "value": to_json_number(value), "validates": find_training_loss(name, self.loss_names)}
                for name, value in self.metrics.items()
            ],
            "utilization": self._utilization,
            "notes": self.notes(),
            "accepts_actions": self.accepts_actions,
            "can_save": self.can_save,
            "action_result": self.action_result,
            "num_earlier": self.num_earlier,
        }

    def memory_snapshots(self) -> list[dict[str, Any]]:
        """Return the latest memory snapshot of each rank, ready for JSON."""
        return [
            {
                "rank": rank,
                "step": snapshot.step,
                "num_segments": snapshot.num_segments,
                "reserved": snapshot.reserved,
                "in_use": snapshot.in_use,
                "largest_free": snapshot.largest_free,
                "segments": snapshot.segments,
                "blocks": snapshot.blocks,
                "holders": [cap_text(name) for name in snapshot.holders],
                "holder_bytes": snapshot.holder_bytes,
            }
            for rank, snapshot in sorted(self.snapshots.items())
        ]

    def notes(self) -> list[str]:
        """Return failures and warnings, one short line each."""
        lines = [f"rank {rank} failed: {reason}" for rank, reason in sorted(self.failures.items())[:4]]
        if self.num_nan:
            first = next((mark.x for mark in self.marks if mark.kind == "nan"), 0)
            more = f" and at {self.num_nan - 1:,} more" if self.num_nan > 1 else ""
            lines.append(f"loss not finite at step {first:,.0f}{more}")
        if self.num_skipped:
            lines.append(f"{self.num_skipped:,} skipped {_plural(self.num_skipped, 'step')}")
        if self.num_dropped:
            lines.append(f"{self.num_dropped:,} malformed {_plural(self.num_dropped, 'record')} dropped")
        return [cap_text(line) for line in [*lines, *self._time_use.advice()]]

    def summary(self) -> str:
        """Return one line: ``120 steps, loss 2.31 -> 0.04, 5.1 ms/step, 2 workers``."""
        num_steps, step_ms = self.ranks.num_steps, self.ranks.step_ms
        parts = [f"{num_steps:,} {_plural(num_steps, 'step')}"] if num_steps else []
        loss = self.curve("loss")
        if loss is not None and len(loss):
            first, last = loss.columns[1][0], loss.columns[1][-1]
            parts.append(f"loss {first:.3g} -> {last:.3g}" if len(loss) > 1 else f"loss {last:.3g}")
        if not num_steps:
            parts += [f"{name} {value:.4g}" for name, value in list(self.metrics.items())[:4]]
        if step_ms is not None:
            parts.append(f"{step_ms:.3g} ms/step")
        parts.append(f"{self.num_workers} {_plural(self.num_workers, 'worker')}")
        if self.status in ("failed", "interrupted"):
            parts.append(self.status)
        return ", ".join(parts)

    def _apply_one(self, event: Event) -> None:
        if not 0 <= event.rank < self.num_workers:
            raise ValueError(f"rank {event.rank} is outside of {self.num_workers} workers")
        progress = self.ranks.of(event.rank)
        if isinstance(event, StepDone):
            self._apply_step(event, progress)
        elif isinstance(event, MemorySample):
            self._apply_memory(event, progress)
        elif isinstance(event, TimeUsed):
            self._time_use.add(event)
            self._apply_time_use(event, progress)
        elif isinstance(event, DeviceLoad):
            self._apply_utilization(event, progress, str(event.name), float(event.value))
        elif isinstance(event, MetricLogged):
            self._apply_metric(event, progress)
        elif isinstance(event, WorkerPrepared):
            progress.device = cap_text(str(event.device), 32)
            progress.place = cap_text(str(event.place), 64)
        elif isinstance(event, RankFailed):
            reason = next(iter(str(event.reason).splitlines()), "")
            self.failures[event.rank] = cap_text(reason, 120)
            self.marks.add(progress.last_x, "failed", event.rank, reason)
        elif isinstance(event, Interrupted):
            self.marks.add(progress.last_x, "interrupted", event.rank)
        elif isinstance(event, CheckpointSaved):
            self._apply_checkpoint(event, progress)
        elif isinstance(event, ControlApplied):
            self.marks.add(float(event.step) + progress.offset, "control", event.rank, str(event.text))
        elif isinstance(event, EpochBegan):
            numbers = int(event.step), int(event.epoch), max(0, int(event.num_steps))
            self._progress.begin_epoch(int(event.loader), *numbers, num_losses=len(self.loss_names))
        elif isinstance(event, LearningRatePlan):
            self._apply_plan(event, progress)
        elif isinstance(event, MemorySnapshot):
            self._apply_memory_snapshot(event)

    def _apply_time_use(self, event: TimeUsed, progress: RankProgress) -> None:
        """Add the share of the time since the last record in which the training thread computed."""
        total_s = event.reading_s + event.computing_s + event.blocked_s + event.queued_s
        # On other devices the time in which the thread queues work counts as computing.
        if progress.device == "cpu" and total_s > 0:
            self._apply_utilization(event, progress, COMPUTING, 100 * event.computing_s / total_s)

    def _apply_utilization(self, event: TimeUsed | DeviceLoad, progress: RankProgress, name: str, value: float) -> None:
        name, x = cap_text(name, 64), float(event.step) + progress.offset
        if name not in self._utilization:
            if len(self._utilization) >= MAX_SENSORS:
                raise ValueError(f"more than {MAX_SENSORS} sensors")
            self._utilization.append(name)
        table = self.tables.table("metric", event.rank, name)
        if not len(table) or x > table.columns[0][-1]:
            table.append((x, value))

    def _apply_checkpoint(self, event: CheckpointSaved, progress: RankProgress) -> None:
        x, url = float(event.step) + progress.offset, str(event.url)
        self.marks.add(x, "checkpoint", event.rank, f"saved to {url}")
        if not self._is_result_final:
            self.set_action_result(f"saved to {url}, after step {x:,.0f}")

    def _apply_memory_snapshot(self, event: MemorySnapshot) -> None:
        numbers = (
            *event.segments,
            *event.blocks,
            *event.holder_bytes,
            event.reserved,
            event.in_use,
            event.largest_free,
        )
        is_whole = len(event.blocks) % 4 == 0 and len(event.holders) == len(event.holder_bytes) <= MAX_HOLDERS
        is_bounded = len(event.segments) <= MAX_SEGMENTS and len(event.blocks) <= 4 * MAX_BLOCKS
        if not (is_whole and is_bounded and all(0 <= number < 2**53 for number in numbers)):
            raise ValueError("a memory snapshot is incomplete or too large")
        if event.rank in self.snapshots or len(self.snapshots) < MAX_SNAPSHOTS:
            self.snapshots[event.rank] = event
            self.num_snapshots += 1

    def _apply_plan(self, event: LearningRatePlan, progress: RankProgress) -> None:
        num_plans = sum(kind == "plan" for kind, _, _ in self.tables)
        rows = [
            (float(step) + progress.offset, float(rate)) for step, rate in zip(event.steps, event.rates, strict=True)
        ]
        if num_plans >= MAX_PLANS or len(rows) > MAX_PLAN_ROWS or rows != sorted(rows, key=lambda row: row[0]):
            raise ValueError("a planned learning rate is unsorted or too long, or there are too many")
        table = self.tables.table("plan", event.rank, str(num_plans))
        for row in rows:
            table.append(row)

    def _apply_step(self, event: StepDone, progress: RankProgress) -> None:
        loss, rate, step_s, time = (
            float(event.loss), float(event.learning_rate), float(event.step_s), float(event.time)
        )  # fmt: skip
        num_samples, curve = int(event.num_samples), cap_text(str(event.curve), 64)
        if curve not in self.loss_names and len(self.loss_names) >= MAX_CURVES:
            curve = self.loss_names[-1]
        is_new = curve not in self.loss_names
        before = progress.last_x
        if progress.move_to(float(event.step)):
            self.marks.add(before, "restart", event.rank)
        x = progress.last_x
        # One report may cover several steps, and some may be missing.
        num_steps = max(1, round(x - before)) if math.isfinite(before) else 1
        self._record_time(progress, time, step_s)
        progress.num_samples += num_samples
        row = (x, loss, rate, step_s * 1e3, progress.num_samples, time - self._start)
        if is_new:
            self.loss_names.append(curve)
        if is_new and len(self.loss_names) > 1:
            self.marks.add(x, "begins", event.rank, curve or "loss")
        self.tables.append("step", event.rank, curve, row, weight=num_samples)
        if curve in progress.num_by_curve:
            progress.recent.append((curve, num_steps, num_samples, step_s))
        progress.num_by_curve[curve] = progress.num_by_curve.get(curve, 0) + num_steps
        progress.num_steps += num_steps
        if event.skipped:
            self.num_skipped += event.rank == min(self.ranks)
            self.marks.add(x, "skipped", event.rank)
        is_nan = not math.isfinite(loss)
        if is_nan and x not in self._nan_at:  # several ranks may report the same step
            self.num_nan += 1
            self._nan_at.append(x)
        if is_nan and not progress.is_nan:
            self.marks.add(x, "nan", event.rank)
        progress.is_nan = is_nan

    def _apply_metric(self, event: MetricLogged, progress: RankProgress) -> None:
        name, value = cap_text(str(event.name), 64), float(event.value)
        if name not in self.metrics and len(self.metrics) >= MAX_METRICS:
            raise ValueError(f"more than {MAX_METRICS} metrics")
        table = self.tables.table("metric", event.rank, name)
        x = float(event.step) + progress.offset
        if len(table) and x <= (last := table.columns[0][-1]):
            x = last if progress.num_steps else last + 1  # a cell without steps: values are numbered
        self.tables.append("metric", event.rank, name, (x, value), weight=1)
        self.metrics[name] = value
        self._record_time(progress, float(event.time), 0.0)

    def _apply_memory(self, event: MemorySample, progress: RankProgress) -> None:
        time = float(event.time)
        if not math.isfinite(time):
            raise ValueError("a time must be finite")
        if math.isnan(self._start):
            self._start = time
        amounts = [
            max(0.0, float(value))
            for value in (event.parameters, event.gradients, event.optimizer, event.other, event.cached, event.free)
        ]
        if progress.device == "cpu":
            # The rest is all that the process has allocated since the first step: a number, not a part of the map.
            progress.process_growth, amounts[3] = amounts[3], 0.0
        table = self.tables.table("memory", event.rank, "")
        x = max(time - self._start, table.columns[0][-1] if len(table) else 0.0)
        table.append((x, *amounts, sum(amounts[:-1])))

    def _record_time(self, progress: RankProgress, time: float, step_s: float) -> None:
        progress.record_time(time, step_s)
        if math.isnan(self._start):
            self._start = progress.first_time

    def _last_value(self, name: str) -> float | None:
        table = self.curve(name)
        return table.columns[STEP_COLUMNS.index(name)][-1] if table is not None and len(table) else None


def _plural(number: int, noun: str) -> str:
    return noun if number == 1 else f"{noun}s"
