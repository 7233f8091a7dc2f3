"""A forecast as text, Markdown or plain data, and the one line that explains the choice. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accel_nb.forecast.layouts import Layout
from accel_nb.forecast.plans import Forecast, Plan, largest_share, smallest
from accel_nb.forecast.sizes import Model

_HEAD = ("each rank", "parameters", "gradients", "optimizer", "activations", "exchange", "peak", "", "checkpointed", "")


def as_text(found: Forecast) -> str:
    """Return a heading, the table, what is not known, and the choice."""
    rows = [_HEAD, *_rows(found)]
    used = [any(row[column] not in ("", "-") for row in rows[1:]) for column in range(len(_HEAD))]
    kept = [[cell for cell, is_used in zip(row, used, strict=True) if is_used] for row in rows]
    widths = [max(map(len, column)) for column in zip(*kept, strict=True)]
    left = [name in ("each rank", "") for name in kept[0]]
    lines = [
        "  ".join(
            cell.ljust(width) if is_left else cell.rjust(width)
            for cell, width, is_left in zip(row, widths, left, strict=True)
        ).rstrip()
        for row in kept
    ]
    return "\n".join([*_heading(found), "", *lines, "", *_remarks(found), explain(found)])


def as_markdown(found: Forecast) -> str:
    """Return the same as a Markdown table."""
    rows = [_HEAD, tuple("---" for _ in _HEAD), *_rows(found)]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*_heading(found), "", *lines, "", *_remarks(found), explain(found)])


def as_data(found: Forecast) -> dict[str, Any]:
    """Return the same as plain values; sizes in bytes."""
    model, setting, best = found.model, found.setting, found.best
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
            "room": setting.room,
            "host_room": setting.host_room,
            "precision": setting.precision,
            "batch_size": setting.batch_size,
            "share": setting.share,
        },
        "plans": [
            {
                "name": plan.layout.name,
                "activation_checkpointing": plan.checkpoints,
                "parameters": plan.usage.parameters,
                "gradients": plan.usage.gradients,
                "optimizer": plan.usage.optimizer,
                "activations": plan.usage.activations if found.knows_activations else None,
                "exchange": plan.usage.exchange,
                "step": plan.usage.step,
                "host": plan.usage.host,
                "peak": plan.usage.total,
                "missing": plan.missing(setting),
                "options": plan.options,
                "is_served": plan.is_served,
            }
            for plan in found.plans
        ],
        "best": None if best is None else {"name": best.name, "options": best.options},
        "why": explain(found),
        "notes": list(found.notes),
    }


def explain(found: Forecast) -> str:
    """Say in one line which plan is taken and why, or by how much nothing fits."""
    setting, best = found.setting, found.best
    if best is None:
        return _refusal(found)
    spare = size_text(setting.room - best.usage.total)
    flags = " ".join(f"--{name.replace('_', '-')}{_value(value)}" for name, value in best.options.items())
    cheaper = [plan for plan in found.plans[: found.plans.index(best)] if plan.is_served]
    if not cheaper:
        why = "the fastest way, and it fits"
    else:
        last = cheaper[0]
        why = f"the fastest way that fits; {last.name} lacks {size_text(last.missing(setting))}"
    return f"-> {best.name} ({flags}): {why} with {spare} to spare"


def _refusal(found: Forecast) -> str:
    setting = found.setting
    plan = smallest(found.plans, setting)
    where = "device" if plan.usage.total > setting.room else "rank of the machine's memory"
    text = (
        f"-> nothing fits: even {plan.name} lacks {size_text(plan.missing(setting))} on each {where} "
        f"({size_text(plan.usage.total)} of {size_text(setting.room)})"
    )
    share = largest_share(plan, setting)
    if share:
        return f"{text}; a batch of about {share * max(1, setting.batch_size // max(1, setting.share))} would fit"
    others = [other for other in found.plans if not other.is_served and other.missing(setting) == 0]
    if others:
        return f"{text}; {others[0].name} would fit, and this version does not serve it"
    return f"{text}, whatever the batch; take more or larger devices, or a smaller model"


def size_text(num_bytes: float) -> str:
    """Return a size for people to read, three digits, in units of 2^10."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1000:
            break
        num_bytes /= 1024
    else:
        unit = "TiB"
    digits = 0 if unit == "B" or abs(num_bytes) >= 100 else 1 if abs(num_bytes) >= 10 else 2
    return f"{num_bytes:.{digits}f} {unit}"


def count_text(count: int) -> str:
    """Return a number of parameters for people to read: ``124 M``."""
    for factor, unit in ((10**9, " G"), (10**6, " M"), (10**3, " k")):
        if count >= factor:
            return f"{count / factor:.3g}{unit}"
    return str(count)


def _heading(found: Forecast) -> list[str]:
    model, setting = found.model, found.setting
    parts = [_parameters(model), f"optimizer {model.optimizer}", f"precision {setting.precision}"]
    if setting.batch_size:
        parts.append(
            f"batch {setting.batch_size}"
            + (f" = {setting.world} x {setting.share}" if setting.world > 1 and setting.share < setting.batch_size else "")
            + (f" on each of {setting.world}" if setting.world > 1 and setting.share == setting.batch_size else "")
        )
    return [f"{model.name}: {', '.join(parts)}", f"{setting.devices}, room for {size_text(setting.room)} on each rank"]


def _parameters(model: Model) -> str:
    frozen = model.num_parameters - model.num_trainable
    text = f"{count_text(model.num_parameters)} parameters"
    return f"{text}, {count_text(frozen)} of them frozen" if frozen else text


def _rows(found: Forecast) -> list[Sequence[str]]:
    plain = {plan.layout: plan for plan in found.plans if not plan.checkpoints}
    again = {plan.layout: plan for plan in found.plans if plan.checkpoints}
    return [_row(found, plan, again.get(layout)) for layout, plan in plain.items()]


def _row(found: Forecast, plan: Plan, again: Plan | None) -> Sequence[str]:
    usage = plan.usage
    sizes = [usage.parameters, usage.gradients, usage.optimizer]
    mark = "" if plan.is_served else " *"
    return (
        plan.layout.name + mark,
        *(size_text(size) if size else "-" for size in sizes),
        size_text(usage.activations) if found.knows_activations else "?",
        size_text(usage.exchange) if usage.exchange else "-",
        size_text(usage.total),
        _verdict(found, plan),
        size_text(again.usage.total) if again is not None else "",
        _verdict(found, again) if again is not None else "",
    )


def _verdict(found: Forecast, plan: Plan) -> str:
    missing = plan.missing(found.setting)
    host = f", host {size_text(plan.usage.host)}" if plan.usage.host else ""
    return (f"lacks {size_text(missing)}" if missing else "fits") + host


def _remarks(found: Forecast) -> list[str]:
    marks = ["* not served by this version"] if any(not plan.layout.is_served for plan in found.plans) else []
    return [*marks, *(f"note: {note}" for note in found.notes)]


def _value(value: str) -> str:
    return "" if value == "true" else f" {value}"
