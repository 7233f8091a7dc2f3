"""A forecast as text, Markdown or plain data, and one line that explains the choice. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from accel_nb.config import Layer
from accel_nb.config.byte_sizes import size_text
from accel_nb.config.flags import flags_to_line
from accel_nb.forecast.layouts import LAYOUTS
from accel_nb.forecast.plans import (
    Forecast,
    Plan,
    RunSetting,
    has_checkpointing,
    max_samples_per_rank,
    refused_cheaper_plan,
    smallest_plan,
)
from accel_nb.forecast.sizes import ModelSizes, count_text

_HEAD = (
    "each rank",
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "exchange",
    "host",
    "messages",
    "peak",
    "",
    "checkpointed",
    "",
)


def render(forecast: Forecast, output_format: Literal["text", "markdown", "json"]) -> str:
    """Return the forecast in the requested format, with a line break at the end."""
    if output_format == "json":
        return json.dumps(as_data(forecast), indent=2) + "\n"
    return (as_markdown(forecast) if output_format == "markdown" else as_text(forecast)) + "\n"


def as_text(forecast: Forecast) -> str:
    """Return a heading, the table, notes and the choice."""
    rows = [_head(), *_rows(forecast)]
    used = [any(row[column] not in ("", "-") for row in rows[1:]) for column in range(len(_HEAD))]
    shown = [[cell for cell, is_used in zip(row, used, strict=True) if is_used] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    left = [name in ("each rank", "") for name in shown[0]]
    lines = [
        "  ".join(
            cell.ljust(width) if is_left else cell.rjust(width)
            for cell, width, is_left in zip(row, widths, left, strict=True)
        ).rstrip()
        for row in shown
    ]
    return "\n".join([*_heading(forecast), "", *lines, "", *_notes(forecast), explain(forecast)])


def as_markdown(forecast: Forecast) -> str:
    """Return the same as a Markdown table."""
    rows = [_head(), ["---"] * len(_HEAD), *_rows(forecast)]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*_heading(forecast), "", *lines, "", *_notes(forecast), explain(forecast)])


def as_data(forecast: Forecast) -> dict[str, Any]:
    """Return the same as plain values; sizes in bytes."""
    model, setting, best = forecast.model, forecast.setting, forecast.best
    return {
        "model": {
            "name": model.name,
            "num_parameters": model.num_parameters,
            "num_trainable": model.num_trainable,
            "optimizer": model.optimizer,
        },
        "setting": {
            "world": setting.world,
            "devices": setting.devices,
            "room": setting.device_bytes,
            "host_room": setting.host_bytes,
            "precision": setting.precision,
            "batch_size": setting.batch_size,
            "share": setting.samples_per_rank,
            "copy_ranks": setting.ranks_per_replica,
        },
        "plans": [
            {
                "name": plan.layout.name,
                "activation_checkpointing": plan.is_checkpointed,
                "parameters": plan.usage.parameters,
                "gradients": plan.usage.gradients,
                "optimizer": plan.usage.optimizer,
                "activations": plan.usage.activations if forecast.has_activations else None,
                "exchange": plan.usage.communication_buffers,
                "step": plan.usage.step,
                "host": plan.usage.host,
                "messages": plan.usage.sent_bytes,
                "peak": plan.usage.total,
                "missing": plan.missing_bytes(setting),
                "options": plan.options,
                "is_supported": plan.is_supported,
            }
            for plan in forecast.plans
        ],
        "best": None if best is None else {"name": best.name, "options": best.options},
        "why": explain(forecast),
        "notes": list(forecast.notes),
    }


def explain(forecast: Forecast) -> str:
    """Return one line with the chosen plan and the reason, or the memory that the smallest plan lacks."""
    setting, best = forecast.setting, forecast.best
    if best is None:
        return _explain_missing_memory(forecast)
    spare = size_text(setting.device_bytes - best.usage.total)
    flags = flags_to_line(Layer("flags", best.options, "plan"))
    first = next(plan for plan in forecast.plans if plan.is_supported)
    missing = first.missing_bytes(setting)
    why = (
        "the simplest way" if first is best else f"{first.name} lacks {size_text(missing)}, this" if missing else "this"
    )
    return f"-> {best.name} ({flags}): {why} fits, with {spare} to spare{_describe_refused_plan(forecast)}"


def _describe_refused_plan(forecast: Forecast) -> str:
    """Return why a cheaper plan that fits was refused; empty if there is none."""
    plan = refused_cheaper_plan(forecast)
    return "" if plan is None else f"; {plan.name} was not chosen: {plan.refusal}"


def _explain_missing_memory(forecast: Forecast) -> str:
    setting = forecast.setting
    plan = smallest_plan(forecast.plans, setting)
    missing = f"-> nothing fits: {plan.name} lacks {size_text(plan.missing_bytes(setting))}"
    if plan.usage.total > setting.device_bytes:
        missing += f" on each rank (it takes {size_text(plan.usage.total)} of {size_text(setting.device_bytes)})"
    else:
        missing += " of the machine's memory for each rank"
    changes: list[str] = []
    share = max_samples_per_rank(plan, setting)
    if share:
        changes.append(f"a batch of about {share * setting.batch_size // setting.samples_per_rank}")
    changes += [f"{other.name}, not supported by this version," for other in _unsupported(forecast)[:1]]
    advice = f"{' or '.join(changes)} would fit" if changes else "use more or larger devices"
    return f"{missing}; {advice}{_describe_refused_plan(forecast)}"


def _unsupported(forecast: Forecast) -> list[Plan]:
    return [plan for plan in forecast.plans if not plan.is_supported and plan.missing_bytes(forecast.setting) == 0]


def _heading(forecast: Forecast) -> list[str]:
    model, setting = forecast.model, forecast.setting
    parts = [_parameters(model), f"optimizer {model.optimizer}", f"precision {setting.precision}"]
    if setting.batch_size:
        parts.append(f"batch {setting.batch_size}{_batch_shares(setting)}")
    place = f"{setting.devices}, room for {size_text(setting.device_bytes)} on each rank"
    if setting.ranks_per_replica is not None:
        place += f"; under fsdp {setting.ranks_per_replica} of {setting.world} share one copy of the model"
    return [f"{model.name}: {', '.join(parts)}", place]


def _batch_shares(setting: RunSetting) -> str:
    if setting.world == 1:
        return ""
    is_shared = setting.samples_per_rank < setting.batch_size
    return f" = {setting.world} x {setting.samples_per_rank}" if is_shared else " on each rank"


def _parameters(model: ModelSizes) -> str:
    frozen = model.num_parameters - model.num_trainable
    text = f"{count_text(model.num_parameters)} parameters"
    return f"{text}, {count_text(frozen)} of them frozen" if frozen else text


def _head() -> Sequence[str]:
    return [name + " *" if name == "checkpointed" and not has_checkpointing() else name for name in _HEAD]


def _rows(forecast: Forecast) -> list[Sequence[str]]:
    plain = {plan.layout: plan for plan in forecast.plans if not plan.is_checkpointed}
    checkpointed = {plan.layout: plan for plan in forecast.plans if plan.is_checkpointed}
    return [_row(forecast, plan, checkpointed.get(layout)) for layout, plan in plain.items()]


def _row(forecast: Forecast, plan: Plan, checkpointed: Plan | None) -> Sequence[str]:
    usage = plan.usage
    sizes = [usage.parameters, usage.gradients, usage.optimizer]
    mark = "" if plan.is_supported else " *"
    return (
        plan.layout.name + mark,
        *(size_text(size) if size else "-" for size in sizes),
        size_text(usage.activations) if forecast.has_activations else "?",
        size_text(usage.communication_buffers) if usage.communication_buffers else "-",
        size_text(usage.host) if usage.host else "-",
        size_text(usage.sent_bytes) if usage.sent_bytes else "-",
        size_text(usage.total),
        _verdict(forecast, plan),
        size_text(checkpointed.usage.total) if checkpointed is not None else "",
        _verdict(forecast, checkpointed) if checkpointed is not None else "",
    )


def _verdict(forecast: Forecast, plan: Plan) -> str:
    missing = plan.missing_bytes(forecast.setting)
    if plan.refusal is not None and plan.layout not in LAYOUTS:
        return "refused"
    return f"lacks {size_text(missing)}" if missing else "fits"


def _notes(forecast: Forecast) -> list[str]:
    marks = [] if all(plan.is_supported for plan in forecast.plans) else ["* not supported by this version"]
    if any(plan.layout not in LAYOUTS for plan in forecast.plans):
        marks.append("activations in a mesh are estimated: stages and parts are assumed to be equal")
    return [*marks, *(f"note: {note}" for note in forecast.notes)]
