"""The report of an out-of-memory error on a worker: the objects in memory, and which changes would fit."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from accel_nb.config import Config, Layer, flags_to_line
from accel_nb.config.byte_sizes import size_text
from accel_nb.forecast.plans import Forecast, Plan, max_samples_per_rank, smallest_plan
from accel_nb.forecast.request import ForecastRequest
from accel_nb.forecast.table import explain
from accel_nb.notebook.messages import RankAnswer
from accel_nb.notebook.reports.forecasting import forecast_notebook
from accel_nb.pool.engine import WorkerSpec
from accel_nb.telemetry.out_of_memory import OutOfMemoryReport

_KINDS = ("parameters", "gradients", "optimizer", "activations", "tensors")


def describe_out_of_memory(
    answers: Sequence[RankAnswer], names: Mapping[str, Any], config: Config, specs: Sequence[WorkerSpec]
) -> list[str]:
    """Return lines about the first rank that ran out of memory, or none.

    If the model is among the notebook's ``names``, a forecast shows which changes would fit.
    """
    reports = [(answer.rank, answer.reply.memory) for answer in answers if answer.reply.memory is not None]
    if not reports:
        return []
    rank, report = min(reports, key=lambda item: item[0])
    others = ", ".join(str(other) for other, _ in reports if other != rank)
    return [
        "",
        *_describe_failure(rank, report),
        *([f"  rank {others} ran out of memory as well"] if others else []),
        *_describe_holders(report),
        *_describe_remedies(report, names, config, specs),
    ]


def _describe_failure(rank: int, report: OutOfMemoryReport) -> Iterator[str]:
    requested = "" if report.requested is None else f"{size_text(report.requested)} were requested, "
    yield f"Memory of rank {rank} ({report.device}): {requested}{size_text(report.free)} were free"
    locations = [report.line, f"in {report.module}" if report.module else ""]
    if any(locations):
        yield "  at " + "   ".join(location for location in locations if location)


def _describe_holders(report: OutOfMemoryReport) -> Iterator[str]:
    bytes_by_kind = [(kind, report.bytes_by_kind.get(kind, 0)) for kind in _KINDS]
    bytes_by_kind += [("not in tensors", report.unattributed), ("cached", report.cached)]
    shown = [(kind if kind != "tensors" else "other tensors", size_text(size)) for kind, size in bytes_by_kind if size]
    widths = [max(len(kind), len(size)) for kind, size in shown]
    yield "  held: " + "  ".join(kind.rjust(width) for (kind, _), width in zip(shown, widths, strict=True))
    yield "        " + "  ".join(size.rjust(width) for (_, size), width in zip(shown, widths, strict=True))
    if report.holders:
        yield "  most of it by"
        yield from (f"    {size_text(holder.nbytes):>8}  {holder.description}" for holder in report.holders)


def _describe_remedies(
    report: OutOfMemoryReport, names: Mapping[str, Any], config: Config, specs: Sequence[WorkerSpec]
) -> Iterator[str]:
    if "torch" not in sys.modules:
        return
    request = ForecastRequest(None, Layer("flags", {}, "the cell"), memory=report.usable)
    try:
        forecast = forecast_notebook(request, names, config, [spec.device for spec in specs])
    except Exception as error:  # the user's model or data may raise anything; the cell's own error is raised instead
        yield f"  what would fit is not known: {type(error).__name__}: {error}"
        return
    if forecast is None:
        yield "  what would fit is not known: the notebook has no model, or several; `%accelerate plan MODEL` forecasts"
        return
    if not forecast.has_activations:
        yield f"  what would fit is not known: {'; '.join(forecast.notes)}"
        return
    changes = list(_forecast_changes(forecast, config))
    available = forecast.setting.device_bytes
    yield f"  by forecast these would take, of {size_text(available)} on each rank:"
    for size, description in changes:
        yield f"    {size_text(size):>8}  {'fits ' if size <= available else 'lacks'}  {description}"
    if all(size > available for size, _ in changes):
        yield f"  {explain(forecast)}"


def _forecast_changes(forecast: Forecast, config: Config) -> Iterator[tuple[int, str]]:
    """Yield bytes and a description of each change: a smaller batch, sharding, activation checkpointing."""
    setting = forecast.setting
    supported = [plan for plan in forecast.plans if plan.is_supported]
    if config.strategy == "auto":
        current = [plan for plan in supported if plan.layout.sharding == "torch"]
    else:
        current = [plan for plan in supported if plan.layout.options.get("strategy") == config.strategy]
    current_plan = next((plan for plan in current if plan.is_checkpointed == config.activation_checkpointing), None)
    if current_plan is None:
        return
    share = _smaller_share(current_plan, forecast)
    if share is not None:
        parts = setting.samples_per_rank // share
        saved = current_plan.usage.activations - current_plan.usage.activations * share // setting.samples_per_rank
        yield (
            current_plan.usage.total - saved,
            f"batch_size={setting.batch_size // parts} in the loader and --accumulate {parts * config.accumulate}, "
            "which trains the same",
        )
    divided = [
        plan for plan in supported if plan not in current and plan.is_checkpointed == current_plan.is_checkpointed
    ]
    checkpointed = [
        plan
        for plan in current
        if plan.layout == current_plan.layout and plan.is_checkpointed > current_plan.is_checkpointed
    ]
    for plans in (divided, checkpointed):
        if plans:
            plan = smallest_plan(plans, setting)
            yield plan.usage.total, flags_to_line(Layer("flags", plan.options, "plan"))


def _smaller_share(plan: Plan, forecast: Forecast) -> int | None:
    """Return the largest divisor of a rank's share of the batch that fits, None if none does."""
    setting = forecast.setting
    available = max_samples_per_rank(plan, setting)
    divisors = [
        share
        for share in range(1, setting.samples_per_rank)
        if setting.samples_per_rank % share == 0 and share <= available
    ]
    return max(divisors, default=None)
