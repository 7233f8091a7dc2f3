"""The description of a run for the receipt of its cell: device, strategy, precision, objects and notes."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from accel_nb.accelerator.components import Components
from accel_nb.accelerator.prepare.preparer import collect_notes, describe_object
from accel_nb.precision.choice import choose_precision
from accel_nb.runtime.devices.registry import device_type
from accel_nb.telemetry.events import WorkerPrepared


def describe_run(components: Components, chosen: Collection[int] | None = None) -> dict[str, Any]:
    """Return device, strategy and precision of this rank, and the prepared objects with ids in ``chosen``, or all."""
    preparer, stepper = components.preparer, components.stepper
    objects = [item for item in preparer.objects if chosen is None or id(item) in chosen]
    namespace: Mapping[str, Any] = stepper.namespace or vars(sys.modules["__main__"])
    names = {id(value): name for name, value in dict(namespace).items() if not name.startswith("_")}
    return {
        "rank": components.world.rank,
        "num_processes": components.world.size,
        "device": str(components.device),
        "strategy": components.strategy.name,
        "strategy_options": components.strategy.describe(),
        "precision": components.strategy.precision.policy.name,
        "accumulate": stepper.window.size,
        "objects": [
            describe_object(item, names.get(id(item)), preparer.batch_descriptions)
            for item in objects
            if not isinstance(item, nn.Module) or any(True for _ in item.parameters())
        ],
        "notes": _notes(components, objects),
    }


def report_run(components: Components, chosen: Collection[int] | None = None) -> None:
    """Emit the description as an event, which the kernel displays at the start of the cell's output."""
    description, mesh = describe_run(components, chosen), components.groups.mesh
    components.sink.emit(
        WorkerPrepared(
            rank=components.world.rank,
            time=time.time(),
            device=description["device"],
            strategy=description["strategy"],
            precision=description["precision"],
            objects=tuple(description["objects"]),
            notes=tuple(description["notes"]),
            place="" if mesh.has_one_dimension else mesh.describe_rank(),
        )
    )


def _notes(components: Components, objects: Sequence[Any]) -> list[str]:
    options, device, preparer = components.resolved.config, components.device, components.preparer
    divides_models = components.stepper.is_plain_cell and options.divide in ("auto", "model")
    notes = collect_notes(objects, components.world.size, device, preparer.whole_loaders, divides_models=divides_models)
    if components.selection.line is not None:
        notes.insert(0, components.selection.line)
    models = [item for item in objects if isinstance(item, nn.Module)]
    if components.float8 is not None:
        notes += [line for model in models for line in components.float8.describe(model)]
    notes += filter(None, map(components.compiler.describe, models))
    notes += filter(None, map(components.recomputer.describe, models))
    if models:
        notes += [f"{name} {value}" for name, value in components.strategy.describe().items()]
    if preparer.has_early_schedule and "schedule" not in components.resolved.given:
        notes.append(
            "schedules advance once for each optimizer step; use --schedule samples for one whose length was computed "
            f"from a loader before prepare, when the loader was {components.data_world.size} times as long"
        )
    if components.stepper.window.size > 1:
        notes.append(f"accumulate {components.stepper.window.size} batches for one step")
    if options.clip is not None:
        notes.append(f"clip {options.clip:g}")
    if options.precision == "auto":
        notes.append(f"precision auto is {choose_precision(options.precision, device)} on this device")
    if options.data.non_blocking and not device_type(device).has_streams:
        notes.append(f"non_blocking has no effect: batches stay on the {device.type}")
    if components.strategy.precision.policy.name == "bf16" and not device_type(device).has_real_bf16(device):
        faster = "full precision (no)" if device_type(device).is_host else "fp16"
        notes.append(f"bf16 is emulated on this device, and slow: {faster} is faster")
    return notes
