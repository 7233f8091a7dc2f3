"""State of a panel, computed from events. Draws nothing and imports no torch."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from accel_nb.telemetry.allocator_blocks import MAX_BLOCKS, MAX_SEGMENTS
from accel_nb.telemetry.events import (
    CheckpointSaved,
    ControlApplied,
    DeviceLoad,
    EpochBegan,
    Event,
    Interrupted,
    MemoryMapped,
    MemorySample,
    MetricLogged,
    RankFailed,
    RatePlanned,
    StepDone,
    TimeUsed,
    WorkerPrepared,
)
from accel_nb.telemetry.validation_names import find_training_loss
from accel_nb.ui.messages import BlockHeader, JsonNumber, PanelFacts, ProgressFacts, Status, TableKind
from accel_nb.ui.progress import LoopPlan, Progress
from accel_nb.ui.rank_progress import PAUSE_RATIO, Pace, RankProgress
from accel_nb.ui.series_table import MAX_ROWS, RowLimit, Table
from accel_nb.ui.time_use import TimeUse

Key = tuple[TableKind, int, str]
Cursor = dict[Key, int]
"""The number of rows of each table that a reader has received."""

MEAN_RANK = -1
"""The rank number that stands for the mean over all ranks."""

STEP_COLUMNS = ("step", "loss", "learning rate", "step time", "samples", "time")
"""``samples`` counts the rank's samples so far; ``time`` is in seconds since the run's first event."""
METRIC_COLUMNS = ("step", "value")
MEMORY_COLUMNS = ("time", "parameters", "gradients", "optimizer", "other", "cached", "free", "total")

PLAN_COLUMNS = ("step", "learning rate")
"""Learning rates of a schedule's future steps; each plan is a separate table, named by a number."""

TABLE_COLUMNS: Mapping[TableKind, tuple[str, ...]] = {
    "step": STEP_COLUMNS,
    "metric": METRIC_COLUMNS,
    "memory": MEMORY_COLUMNS,
    "plan": PLAN_COLUMNS,
}
"""The columns of each table; the first is x, the last of ``memory`` is the total."""

MAX_TEXT = 256
MAX_PRINTED = 16_000
"""The number of characters of a cell's printed text that are kept for reloaded pages."""
MAX_MARKS = 200
MAX_CHECKPOINT_MARKS = 64
"""At this number every second checkpoint mark is dropped, so that marks of failures still fit into `MAX_MARKS`."""
MAX_METRICS = 32
MAX_SENSORS = 8
MAX_CURVES = 32
"""The maximum number of losses that have a curve of their own; further ones continue the last."""
MAX_BYTES: Mapping[TableKind, int] = {
    "step": 512_000_000,
    "metric": 128_000_000,
    "memory": 8_000_000,
    "plan": 1_000_000,
}
"""Limit of the size of all tables of a kind together, over all ranks and metrics; beyond it older rows are thinned."""
MAX_PLANS = 8
MAX_PLAN_ROWS = 4000
MAX_MAPS = 8
"""The maximum number of ranks whose memory map is kept: as many as the panel draws."""
MAX_HOLDERS = 16
MAX_SNAPSHOT_ROWS = 40_000
WAITING_ROWS = 4096
"""The number of rows that the mean waits for a rank: as many as a ring holds, since rings are read one by one."""
COMPUTING = "computing (%)"
"""The table of the share of time in which a rank's training thread computes."""
NAN_STEPS = 64
STRAGGLER_RATIO = 1.25
STRAGGLER_MS = 1.0


@dataclass(frozen=True, slots=True)
class Mark:
    """An event at a position on the step axis."""

    x: float
    kind: Literal["nan", "skipped", "restart", "failed", "interrupted", "checkpoint", "steered", "begins"]
    rank: int
    text: str


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of one table; ``columns`` are arrays of float64, Python's or numpy's."""

    table: TableKind
    rank: int
    name: str
    columns: Sequence[Any]


class RankMean:
    """Mean over ranks, row by row; a rank that reports nothing delays it by at most `WAITING_ROWS` rows."""

    def __init__(self, table: Table, num_ranks: int) -> None:
        self.table = table
        self._num_ranks = num_ranks
        self._reporting_ranks: set[int] = set()
        self._incomplete_rows: dict[float, list[tuple[float, Sequence[float]]]] = {}
        self._last_x = -math.inf

    def add(self, rank: int, x: float, weight: float, values: Sequence[float]) -> None:
        """Add one rank's values at ``x`` with a weight."""
        if x <= self._last_x:
            return
        self._reporting_ranks.add(rank)
        self._num_ranks = max(self._num_ranks, len(self._reporting_ranks))
        rows = self._incomplete_rows.setdefault(x, [])
        rows.append((weight, values))
        if len(rows) >= self._num_ranks:
            self._flush(x)
        elif len(self._incomplete_rows) > WAITING_ROWS:
            self._num_ranks = max(1, len(self._reporting_ranks))
            self._flush(min(self._incomplete_rows))

    def finish(self) -> None:
        """Append the rows for which values of some ranks are missing, as the mean over the other ranks."""
        if self._incomplete_rows:
            self._flush(max(self._incomplete_rows))

    def _flush(self, last_x: float) -> None:
        for x in sorted(x for x in self._incomplete_rows if x <= last_x):
            self.table.append((x, *_weighted_mean(self._incomplete_rows.pop(x))))
        self._last_x = last_x


class PanelState:
    """State of one panel, a pure function of the events so far."""

    def __init__(self, title: str, num_workers: int, *, max_rows: int = MAX_ROWS, plan: LoopPlan | None = None) -> None:
        self.title = cap_text(title)
        self.num_workers = num_workers
        self.status: Status = "running"
        self.tables: dict[Key, Table] = {}
        self.marks: list[Mark] = []
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
        # The latest memory map of each rank, and the number of maps that have arrived.
        self.maps: dict[int, MemoryMapped] = {}
        self.num_mapped = 0
        # The number of runs to compare with.
        self.num_earlier = 0
        self.metrics: dict[str, float] = {}
        self._rank_progress: dict[int, RankProgress] = {}
        self._means: dict[tuple[TableKind, str], RankMean] = {}
        self._row_limits = {kind: RowLimit(max_bytes, max_rows) for kind, max_bytes in MAX_BYTES.items()}
        self._nan_at: deque[float] = deque(maxlen=NAN_STEPS)
        self._start = math.nan
        self._progress = Progress(plan)
        self._time_use = TimeUse()
        self._utilization: list[str] = []

    @property
    def progress(self) -> ProgressFacts:
        """The run's epoch, its completed fraction and the remaining time."""
        return self._progress.facts(
            self.last_step, self._elapsed_s(), len(self.loss_names), is_over=self.status != "running"
        )

    @property
    def has_data(self) -> bool:
        """Whether a step or a metric has been reported, which the panel can draw."""
        return any(table == "step" or table == "metric" for table, _, _ in self.tables)

    @property
    def num_steps(self) -> int:
        """The largest number of steps that a rank has made."""
        return max((progress.num_steps for progress in self._rank_progress.values()), default=0)

    @property
    def last_step(self) -> int:
        """The last step on the horizontal axis that all ranks have reported, as the losses of the header have."""
        means = (self.mean("step", name) for name in self.loss_names)
        return int(max((mean.columns[0][-1] for mean in means if mean is not None), default=0))

    @property
    def num_rows(self) -> int:
        """The number of rows of the largest table."""
        return max((len(table) for table in self.tables.values()), default=0)

    @property
    def num_bytes(self) -> int:
        """The size of all rows, in bytes."""
        return 8 * sum(len(table) * len(table.columns) for table in self.tables.values())

    @property
    def ranks(self) -> list[int]:
        """The ranks that have reported, in order."""
        return sorted(self._rank_progress)

    def fold(self, events: Iterable[Event]) -> None:
        """Update the state by events; malformed ones are counted and dropped."""
        for event in events:
            try:
                self._fold_one(event)
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
        for mean in self._means.values():
            mean.finish()
        for rank, progress in self._rank_progress.items():
            progress.final = self._final_pace(rank) or progress.pace

    def columns_since(self, cursor: Cursor, max_bytes: int | None = None) -> tuple[list[Block], Cursor] | None:
        """Return the rows after a reader's cursor and its new cursor.

        Returns None if some of the rows were thinned: the reader needs a snapshot. If the rows are larger than
        ``max_bytes``, they are downsampled to the minima and maxima of each table, at least two rows.
        """
        totals = {key: table.total for key, table in self.tables.items()}
        behind = {key: cursor.get(key, 0) for key, total in totals.items() if cursor.get(key, 0) != total}
        row_bytes = 8 * sum(len(self.tables[key].columns) for key in behind)
        limits = {} if max_bytes is None or not behind else {"max_rows": max(2, max_bytes // row_bytes)}
        blocks: list[Block] = []
        for key, num_received in behind.items():
            # A plan is sent once, with all its rows.
            columns = self.tables[key].rows_since(num_received, **({} if key[0] == "plan" else limits))
            if columns is None:
                return None
            blocks.append(Block(*key, columns))
        return blocks, totals

    def detail(self, kind: TableKind, name: str, first: float, last: float, max_points: int = 4000) -> list[Block]:
        """Return the rows of a curve with x in ``[first, last]``, for every rank, about ``max_points`` each."""
        return [
            Block(*key, list(columns))
            for key, table in self.tables.items()
            if (key[0], key[2]) == (kind, name)
            and (columns := table.downsampled_between(first, last, max_points)).shape[1]
        ]

    def snapshot(self, max_points: int = 2000) -> tuple[list[Block], Cursor]:
        """Return all tables, downsampled to at most about ``max_points`` rows each, and the cursor after them."""
        limit = max(64, min(max_points, MAX_SNAPSHOT_ROWS // max(1, len(self.tables))))
        blocks = [
            Block(*key, list(table.downsampled(limit // 4 if key[0] == "memory" else limit)))
            for key, table in self.tables.items()
            if len(table)
        ]
        return blocks, {key: table.total for key, table in self.tables.items()}

    def curve(self, name: str = "loss") -> Table | None:
        """Return the table of a step value or metric: the mean over ranks, or the only rank's.

        With several losses, a step value such as the learning rate is read from the first one's table.
        """
        if name not in STEP_COLUMNS:
            return self.mean("step", name) if name in self.loss_names else self.mean("metric", name)
        return next((self.mean("step", loss) for loss in self.loss_names), None)

    def mean(self, kind: TableKind, name: str) -> Table | None:
        """Return the table of the mean over ranks, or of the only rank; None before the first row."""
        mean = self.tables.get((kind, MEAN_RANK, name))
        if mean is not None and len(mean):
            return mean
        return next((table for (k, _, n), table in self.tables.items() if (k, n) == (kind, name) and len(table)), None)

    def validation_losses(self, loss: str) -> dict[str, Table]:
        """Return the tables of the validation losses of a loss, by the names of the metrics."""
        names = [name for name in self.metrics if find_training_loss(name, self.loss_names) == loss]
        return {name: table for name in names if (table := self.mean("metric", name)) is not None}

    def device(self, rank: int) -> str:
        """Return the device that a rank has reported; empty if it has reported none yet."""
        return self._rank_progress[rank].device if rank in self._rank_progress else ""

    def straggler(self) -> int | None:
        """Return the rank that others wait for, or whose step takes clearly longer; None if there is none."""
        if (waited_for := self._time_use.straggler()) is not None:
            return waited_for
        medians = {
            rank: progress.pace.step_ms for rank, progress in self._rank_progress.items() if len(progress.recent) >= 8
        }
        times = {rank: value for rank, value in medians.items() if value is not None}
        if len(times) < 2:
            return None
        slowest = max(times, key=lambda rank: times[rank])
        others_ms = statistics.median(value for rank, value in times.items() if rank != slowest)
        is_slow = times[slowest] > STRAGGLER_RATIO * others_ms and times[slowest] - others_ms > STRAGGLER_MS
        return slowest if is_slow else None

    def samples_per_s(self) -> float | None:
        """Return samples per second over all ranks: in recent steps, or in the whole run once it has ended."""
        return sum(progress.pace.samples_per_s for progress in self._rank_progress.values()) or None

    def step_ms(self) -> float | None:
        """Return the slowest rank's step duration: in recent steps, or in the whole run once it has ended."""
        return max(
            (ms for progress in self._rank_progress.values() if (ms := progress.pace.step_ms) is not None), default=None
        )

    def _final_pace(self, rank: int) -> Pace | None:
        """Return a rank's pace over all its steps; None if it made only the first step of each curve."""
        import numpy as np

        total = Pace()
        tables = {name: table for (kind, key, name), table in self.tables.items() if (kind, key) == ("step", rank)}
        if not tables:
            return None
        # The column of samples counts over all curves of the rank.
        ends = np.sort(np.concatenate([np.array(table.columns[4]) for table in tables.values()]))
        for table in tables.values():
            rows = np.array([table.columns[0], table.columns[3], table.columns[4]])
            times_s = rows[1][1:] / 1e3
            if not len(times_s):
                continue
            before = ends[np.maximum(np.searchsorted(ends, rows[2][1:]) - 1, 0)]
            num_steps = np.diff(rows[0]) if len(tables) == 1 else np.ones(len(times_s))
            steady = times_s <= PAUSE_RATIO * np.median(times_s)
            total = Pace(
                total.num_steps + float(num_steps[steady].sum()),
                total.num_samples + float((rows[2][1:] - before)[steady].sum()),
                total.time_s + float((num_steps * times_s)[steady].sum()),
            )
        return total if total.num_steps else None

    def facts(self) -> PanelFacts:
        """Return the header's figures, ready for JSON."""
        slow = self.straggler()
        return {
            "title": self.title,
            "status": self.status,
            "num_workers": self.num_workers,
            "step": self.last_step,
            "loss": to_json_number(self._last_value("loss")),
            "losses": [
                {"name": name or "loss", "value": to_json_number(table.columns[1][-1])}
                for name in self.loss_names
                if (table := self.mean("step", name)) is not None
            ],
            "learning_rate": to_json_number(self._last_value("learning rate")),
            "samples_per_s": to_json_number(self.samples_per_s()),
            "step_ms": to_json_number(self.step_ms()),
            "elapsed_s": to_json_number(self._elapsed_s()),
            "progress": self.progress,
            "ranks": [
                {
                    "rank": rank,
                    "device": progress.device,
                    "place": progress.place,
                    "step_ms": to_json_number(progress.pace.step_ms),
                    "is_straggler": rank == slow,
                    "time_use": self._time_use.shares(rank),
                    "process_growth": to_json_number(progress.process_growth),
                }
                for rank, progress in sorted(self._rank_progress.items())
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

    def memory_maps(self) -> list[dict[str, Any]]:
        """Return the latest memory map of each rank, ready for JSON."""
        return [
            {
                "rank": rank,
                "step": memory_map.step,
                "num_segments": memory_map.num_segments,
                "reserved": memory_map.reserved,
                "in_use": memory_map.in_use,
                "largest_free": memory_map.largest_free,
                "segments": memory_map.segments,
                "blocks": memory_map.blocks,
                "holders": [cap_text(name) for name in memory_map.holders],
                "held": memory_map.held,
            }
            for rank, memory_map in sorted(self.maps.items())
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
        parts = [f"{self.num_steps:,} {_plural(self.num_steps, 'step')}"] if self.num_steps else []
        loss = self.curve("loss")
        if loss is not None and len(loss):
            first, last = loss.columns[1][0], loss.columns[1][-1]
            parts.append(f"loss {first:.3g} -> {last:.3g}" if len(loss) > 1 else f"loss {last:.3g}")
        if not self.num_steps:
            parts += [f"{name} {value:.4g}" for name, value in list(self.metrics.items())[:4]]
        step_ms = self.step_ms()
        if step_ms is not None:
            parts.append(f"{step_ms:.3g} ms/step")
        parts.append(f"{self.num_workers} {_plural(self.num_workers, 'worker')}")
        if self.status in ("failed", "interrupted"):
            parts.append(self.status)
        return ", ".join(parts)

    def _fold_one(self, event: Event) -> None:
        if not 0 <= event.rank < self.num_workers:
            raise ValueError(f"rank {event.rank} is outside of {self.num_workers} workers")
        progress = self._rank_progress.setdefault(event.rank, RankProgress())
        if isinstance(event, StepDone):
            self._fold_step(event, progress)
        elif isinstance(event, MemorySample):
            self._fold_memory(event, progress)
        elif isinstance(event, TimeUsed):
            self._time_use.add(event)
            self._fold_time_use(event, progress)
        elif isinstance(event, DeviceLoad):
            self._fold_utilization(event, progress, str(event.name), float(event.value))
        elif isinstance(event, MetricLogged):
            self._fold_metric(event, progress)
        elif isinstance(event, WorkerPrepared):
            progress.device = cap_text(str(event.device), 32)
            progress.place = cap_text(str(event.place), 64)
        elif isinstance(event, RankFailed):
            reason = next(iter(str(event.reason).splitlines()), "")
            self.failures[event.rank] = cap_text(reason, 120)
            self._mark(progress.last_x, "failed", event.rank, reason)
        elif isinstance(event, Interrupted):
            self._mark(progress.last_x, "interrupted", event.rank, "")
        elif isinstance(event, CheckpointSaved):
            self._fold_checkpoint(event, progress)
        elif isinstance(event, ControlApplied):
            self._mark(float(event.step) + progress.offset, "steered", event.rank, str(event.text))
        elif isinstance(event, EpochBegan):
            numbers = int(event.step), int(event.epoch), max(0, int(event.num_steps))
            self._progress.begin_epoch(int(event.loader), *numbers, num_losses=len(self.loss_names))
        elif isinstance(event, RatePlanned):
            self._fold_plan(event, progress)
        elif isinstance(event, MemoryMapped):
            self._fold_map(event)

    def _fold_time_use(self, event: TimeUsed, progress: RankProgress) -> None:
        """Add the share of the time since the last record in which the training thread computed."""
        total_s = event.reading_s + event.computing_s + event.blocked_s + event.queued_s
        # On other devices the time in which the thread queues work counts as computing.
        if progress.device == "cpu" and total_s > 0:
            self._fold_utilization(event, progress, COMPUTING, 100 * event.computing_s / total_s)

    def _fold_utilization(self, event: TimeUsed | DeviceLoad, progress: RankProgress, name: str, value: float) -> None:
        name, x = cap_text(name, 64), float(event.step) + progress.offset
        if name not in self._utilization:
            if len(self._utilization) >= MAX_SENSORS:
                raise ValueError(f"more than {MAX_SENSORS} sensors")
            self._utilization.append(name)
        table = self._table("metric", event.rank, name, len(METRIC_COLUMNS))
        if not len(table) or x > table.columns[0][-1]:
            table.append((x, value))

    def _fold_checkpoint(self, event: CheckpointSaved, progress: RankProgress) -> None:
        x, url = float(event.step) + progress.offset, str(event.url)
        earlier = [mark for mark in self.marks if mark.kind == "checkpoint"]
        if len(earlier) >= MAX_CHECKPOINT_MARKS:
            dropped = set(map(id, earlier[1::2]))
            self.marks = [mark for mark in self.marks if id(mark) not in dropped]
        self._mark(x, "checkpoint", event.rank, f"saved to {url}")
        if not self._is_result_final:
            self.set_action_result(f"saved to {url}, after step {x:,.0f}")

    def _fold_map(self, event: MemoryMapped) -> None:
        numbers = (*event.segments, *event.blocks, *event.held, event.reserved, event.in_use, event.largest_free)
        is_whole = len(event.blocks) % 4 == 0 and len(event.holders) == len(event.held) <= MAX_HOLDERS
        is_bounded = len(event.segments) <= MAX_SEGMENTS and len(event.blocks) <= 4 * MAX_BLOCKS
        if not (is_whole and is_bounded and all(0 <= number < 2**53 for number in numbers)):
            raise ValueError("a memory map is incomplete or too large")
        if event.rank in self.maps or len(self.maps) < MAX_MAPS:
            self.maps[event.rank] = event
            self.num_mapped += 1

    def _fold_plan(self, event: RatePlanned, progress: RankProgress) -> None:
        num_plans = sum(kind == "plan" for kind, _, _ in self.tables)
        rows = [
            (float(step) + progress.offset, float(rate)) for step, rate in zip(event.steps, event.rates, strict=True)
        ]
        if num_plans >= MAX_PLANS or len(rows) > MAX_PLAN_ROWS or rows != sorted(rows, key=lambda row: row[0]):
            raise ValueError("a planned learning rate is unsorted or too long, or there are too many")
        table = self._table("plan", event.rank, str(num_plans), len(PLAN_COLUMNS))
        for row in rows:
            table.append(row)

    def _fold_step(self, event: StepDone, progress: RankProgress) -> None:
        loss, rate, step_s, time = (
            float(event.loss), float(event.learning_rate), float(event.step_s), float(event.time)
        )  # fmt: skip
        num_samples, curve = int(event.num_samples), cap_text(str(event.curve), 64)
        if curve not in self.loss_names and len(self.loss_names) >= MAX_CURVES:
            curve = self.loss_names[-1]
        is_new = curve not in self.loss_names
        before = progress.last_x
        x = self._step_position(event.rank, float(event.step), progress)
        # One report may cover several steps, and some may be missing.
        num_steps = max(1, round(x - before)) if math.isfinite(before) else 1
        self._record_time(progress, time, step_s)
        progress.num_samples += num_samples
        row = (x, loss, rate, step_s * 1e3, progress.num_samples, time - self._start)
        if is_new:
            self.loss_names.append(curve)
        if is_new and len(self.loss_names) > 1:
            self._mark(x, "begins", event.rank, curve or "loss")
        self._table("step", event.rank, curve, len(STEP_COLUMNS)).append(row)
        if self.num_workers > 1:
            self._mean("step", curve, len(STEP_COLUMNS)).add(event.rank, x, num_samples, row[1:])
        if curve in progress.num_by_curve:
            progress.recent.append((curve, num_steps, num_samples, step_s))
        progress.num_by_curve[curve] = progress.num_by_curve.get(curve, 0) + num_steps
        progress.num_steps += num_steps
        if event.skipped:
            self.num_skipped += event.rank == min(self._rank_progress)
            self._mark(x, "skipped", event.rank, "")
        is_nan = not math.isfinite(loss)
        if is_nan and x not in self._nan_at:  # several ranks may report the same step
            self.num_nan += 1
            self._nan_at.append(x)
        if is_nan and not progress.is_nan:
            self._mark(x, "nan", event.rank, "")
        progress.is_nan = is_nan

    def _fold_metric(self, event: MetricLogged, progress: RankProgress) -> None:
        name, value = cap_text(str(event.name), 64), float(event.value)
        if name not in self.metrics and len(self.metrics) >= MAX_METRICS:
            raise ValueError(f"more than {MAX_METRICS} metrics")
        table = self._table("metric", event.rank, name, len(METRIC_COLUMNS))
        x = float(event.step) + progress.offset
        if len(table) and x <= (last := table.columns[0][-1]):
            x = last if progress.num_steps else last + 1  # a cell without steps: values are numbered
        table.append((x, value))
        if self.num_workers > 1:
            self._mean("metric", name, len(METRIC_COLUMNS)).add(event.rank, x, 1, (value,))
        self.metrics[name] = value
        self._record_time(progress, float(event.time), 0.0)

    def _fold_memory(self, event: MemorySample, progress: RankProgress) -> None:
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
        table = self._table("memory", event.rank, "", len(MEMORY_COLUMNS))
        x = max(time - self._start, table.columns[0][-1] if len(table) else 0.0)
        table.append((x, *amounts, sum(amounts[:-1])))

    def _step_position(self, rank: int, step: float, progress: RankProgress) -> float:
        """Return the x of a step; if the count restarts, as in a second loop, x continues after the first loop."""
        x = step + progress.offset
        if x <= progress.last_x:
            if step < progress.last_step:
                self._mark(progress.last_x, "restart", rank, "")
            progress.offset += progress.last_x + 1 - x
            x = progress.last_x + 1
        progress.last_x, progress.last_step = x, step
        return x

    def _record_time(self, progress: RankProgress, time: float, step_s: float) -> None:
        if math.isnan(progress.first_time):
            progress.first_time = time - step_s
        progress.last_time = time
        if math.isnan(self._start):
            self._start = progress.first_time

    def _mark(self, x: float, kind: Any, rank: int, text: str) -> None:
        """Add a mark, unless there is one of this kind at this x, as from another rank."""
        if any(mark.x == x and mark.kind == kind for mark in self.marks[-8:]):
            return
        if len(self.marks) < MAX_MARKS and math.isfinite(x):
            self.marks.append(Mark(x, kind, rank, cap_text(text)))

    def _table(self, kind: TableKind, rank: int, name: str, num_columns: int) -> Table:
        table = self.tables.get((kind, rank, name))
        if table is None:
            key = num_columns - 1 if kind == "memory" else 1
            table = Table(num_columns, key=key, row_limit=self._row_limits[kind])
            self.tables[kind, rank, name] = table
        return table

    def _mean(self, kind: TableKind, name: str, num_columns: int) -> RankMean:
        mean = self._means.get((kind, name))
        if mean is None:
            mean = RankMean(self._table(kind, MEAN_RANK, name, num_columns), self.num_workers)
            self._means[kind, name] = mean
        return mean

    def _last_value(self, name: str) -> float | None:
        table = self.curve(name)
        return table.columns[STEP_COLUMNS.index(name)][-1] if table is not None and len(table) else None

    def _elapsed_s(self) -> float:
        times = [progress.last_time for progress in self._rank_progress.values() if not math.isnan(progress.last_time)]
        starts = [
            progress.first_time for progress in self._rank_progress.values() if not math.isnan(progress.first_time)
        ]
        return max(0.0, max(times) - min(starts)) if times and starts else 0.0


def to_json_number(value: float | None) -> JsonNumber:
    """Return the number, or its name if it is NaN or infinite, which JSON cannot represent."""
    if value is None or math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def cap_text(text: str, limit: int = MAX_TEXT) -> str:
    """Cut a text from a user or a worker to ``limit`` characters."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def pack_blocks(blocks: Sequence[Block]) -> tuple[list[BlockHeader], bytes]:
    """Return the blocks' headers and one float64 buffer, which stores the blocks in order, each column by column."""
    headers: list[BlockHeader] = [
        {"table": block.table, "rank": block.rank, "name": block.name, "rows": len(block.columns[0])}
        for block in blocks
    ]
    return headers, b"".join(column.tobytes() for block in blocks for column in block.columns)


def _weighted_mean(rows: Sequence[tuple[float, Sequence[float]]]) -> list[float]:
    total = sum(weight for weight, _ in rows)
    weights = [weight / total for weight, _ in rows] if total > 0 else [1 / len(rows)] * len(rows)
    return [
        sum(weight * values[index] for weight, (_, values) in zip(weights, rows, strict=True))
        for index in range(len(rows[0][1]))
    ]


def _plural(number: int, noun: str) -> str:
    return noun if number == 1 else f"{noun}s"
