"""Memory has run out on a worker: who held it, what was asked for, and which changes would fit."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from accel_nb.config import Config, Layer, flags_to_line
from accel_nb.forecast.plans import Forecast, Plan, largest_share, smallest
from accel_nb.forecast.request import Request
from accel_nb.forecast.sizes import size_text
from accel_nb.forecast.table import explain
from accel_nb.notebook.reports.forecasting import forecast_notebook
from accel_nb.pool.control.stop_escalation import Answer
from accel_nb.pool.engine import WorkerSpec

_KINDS = ("parameters", "gradients", "optimizer", "activations", "tensors")


def post_mortem(
    answers: Sequence[Answer], names: Mapping[str, Any], config: Config, specs: Sequence[WorkerSpec]
) -> list[str]:
    """Return lines about the first rank whose memory has run out; none if no rank's has.

    ``names`` are the notebook's: where they have the model, its forecast says what would fit.
    """
    told = [(answer.rank, answer.body["memory"]) for answer in answers if answer.body.get("memory")]
    if not told:
        return []
    rank, found = min(told)
    others = ", ".join(str(other) for other, _ in told if other != rank)
    return [
        "",
        *_what_happened(rank, found),
        *([f"  rank {others} ran out of memory as well"] if others else []),
        *_what_was_held(found),
        *_what_would_fit(found, names, config, specs),
    ]


def _what_happened(rank: int, found: Mapping[str, Any]) -> Iterator[str]:
    asked = "" if found["asked"] is None else f"{size_text(found['asked'])} were asked for, "
    yield f"Memory of rank {rank} ({found['device']}): {asked}{size_text(found['free'])} were free"
    places = [found["line"], f"in {found['module']}" if found["module"] else ""]
    if any(places):
        yield "  at " + "   ".join(place for place in places if place)


def _what_was_held(found: Mapping[str, Any]) -> Iterator[str]:
    held = [(kind, found["held"].get(kind, 0)) for kind in _KINDS]
    held += [("not in tensors", found["rest"]), ("cached", found["cached"])]
    shown = [(kind if kind != "tensors" else "other tensors", size_text(size)) for kind, size in held if size]
    widths = [max(len(kind), len(size)) for kind, size in shown]
    yield "  held: " + "  ".join(kind.rjust(width) for (kind, _), width in zip(shown, widths, strict=True))
    yield "        " + "  ".join(size.rjust(width) for (_, size), width in zip(shown, widths, strict=True))
    if found["holders"]:
        yield "  most of it by"
        yield from (f"    {size_text(size):>8}  {what}" for what, size in found["holders"])


def _what_would_fit(
    found: Mapping[str, Any], names: Mapping[str, Any], config: Config, specs: Sequence[WorkerSpec]
) -> Iterator[str]:
    if "torch" not in sys.modules:
        return
    request = Request(None, Layer("flags", {}, "the cell"), memory=found["room"])
    try:
        forecast = forecast_notebook(request, names, config, [spec.device for spec in specs])
    except Exception as error:  # whatever the user's model and data raise: the cell's own error is what counts
        yield f"  what would fit is not known: {type(error).__name__}: {error}"
        return
    if forecast is None:
        yield "  what would fit is not known: the notebook has no model, or several; `%accelerate plan MODEL` forecasts"
        return
    if not forecast.knows_activations:
        yield f"  what would fit is not known: {'; '.join(forecast.notes)}"
        return
    changes = list(_changes(forecast, config))
    room = forecast.setting.room
    yield f"  by forecast, of {size_text(room)} on each rank, would take"
    for size, what in changes:
        yield f"    {size_text(size):>8}  {'fits ' if size <= room else 'lacks'}  {what}"
    if all(size > room for size, _ in changes):
        yield f"  {explain(forecast)}"


def _changes(found: Forecast, config: Config) -> Iterator[tuple[int, str]]:
    """Yield what each single change would take: a smaller batch, sharding, activations that are computed again."""
    setting = found.setting
    served = [plan for plan in found.plans if plan.is_served]
    if config.strategy == "auto":
        mine = [plan for plan in served if plan.layout.engine == "torch"]
    else:
        mine = [plan for plan in served if plan.layout.options.get("strategy") == config.strategy]
    now = next((plan for plan in mine if plan.checkpoints == config.activation_checkpointing), None)
    if now is None:
        return
    share = _smaller(now, found)
    if share is not None:
        parts = setting.share // share
        saved = now.usage.activations - now.usage.activations * share // setting.share
        yield (
            now.usage.total - saved,
            f"batch_size={setting.batch_size // parts} in the loader and --accumulate {parts * config.accumulate}, "
            "which trains the same",
        )
    divided = [plan for plan in served if plan not in mine and plan.checkpoints == now.checkpoints]
    again = [plan for plan in mine if plan.layout == now.layout and plan.checkpoints > now.checkpoints]
    for plans in (divided, again):
        if plans:
            plan = smallest(plans, setting)
            yield plan.usage.total, flags_to_line(Layer("flags", plan.options, "plan"))


def _smaller(plan: Plan, found: Forecast) -> int | None:
    """Return the largest part of a rank's share that fits and that the share is a multiple of."""
    setting = found.setting
    room = largest_share(plan, setting)
    fitting = [share for share in range(1, setting.share) if setting.share % share == 0 and share <= room]
    return max(fitting, default=None)
