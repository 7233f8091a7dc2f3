"""A description of what a run would do, for ``--dry-run`` and ``%accelerate plan``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from accel_nb.config import Resolved
from accel_nb.pool.engine import WorkerSpec


def describe_plan(resolved: Resolved, specs: Sequence[WorkerSpec]) -> str:
    """Return the plan: workers and devices, then each given option with its origin."""
    config = resolved.config
    devices = ", ".join(f"{count} x {device}" for device, count in Counter(spec.device for spec in specs).items())
    strategy = config.strategy
    if strategy == "auto" and not resolved.given.keys().isdisjoint(("strategy", "memory")):
        strategy += " (by the memory that the model takes)"
    elif strategy == "auto":
        strategy += " (data parallel)" if len(specs) > 1 else " (one device)"
    divided = {name: degree for name in ("pp", "cp", "tp") if (degree := getattr(config.mesh, name)) > 1}
    experts = {"ep": config.mesh.ep} if config.mesh.ep > 1 else {}
    if divided or experts:
        sizes = {"dp": len(specs) // math.prod(divided.values()), **divided, **experts}
        strategy += f", mesh {' x '.join(f'{name} {size}' for name, size in sizes.items())}"
    lines = [
        f"{len(specs)} worker{'s' if len(specs) != 1 else ''}: {devices}, threads each: {specs[0].num_threads}",
        f"strategy {strategy}, precision {config.precision}, accumulate {config.accumulate}",
    ]
    lines += [
        f"{row.option} = {row.value} from {row.origin}" for row in resolved.explain() if row.option in resolved.given
    ]
    return "\n".join([*lines, *(f"note: {note}" for note in resolved.notes)])
