"""Events of a training run that never happened: what the panel's tests draw."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

from accel_nb.telemetry.allocator_blocks import condense_snapshot
from accel_nb.telemetry.events import (
    Event,
    LearningRatePlan,
    MemorySample,
    MemorySnapshot,
    MetricLogged,
    StepDone,
    WorkerPrepared,
)

MIB = 2**20


def training_events(
    num_steps: int, *, num_ranks: int = 2, step_s: float = 0.02, start: float = 1.7e9
) -> Iterator[Event]:
    """Yield a falling loss, a skipped step, a NaN, a slow last rank and a memory that fills in the first steps."""
    noise = random.Random(0)
    for rank in range(num_ranks):
        yield WorkerPrepared(rank, start, "cpu", "ddp", "no", ("model",), ())
    for step in range(1, num_steps + 1):
        time = start + step * step_s
        for rank in range(num_ranks):
            loss = 0.08 + 2.3 * math.exp(-5 * step / num_steps) * (1 + 0.12 * noise.gauss(0, 1))
            yield StepDone(
                rank=rank,
                step=step,
                time=time,
                loss=math.nan if step == num_steps // 3 else loss,
                learning_rate=_rate(step, num_steps),
                step_s=step_s * (0.6 + 0.02 * noise.random() + (0.3 if rank == num_ranks - 1 and rank else 0)),
                num_samples=32,
                skipped=step == num_steps // 5,
            )
            if step % 5 == 0 or step < 6:
                yield _memory(rank, step, time, noise)
        if step % 50 == 0:
            yield MetricLogged(0, step, time, "accuracy", 1 - 0.9 * math.exp(-4 * step / num_steps))
            yield MetricLogged(0, step, time, "val/loss", 0.3 + 2.2 * math.exp(-3.5 * step / num_steps))


def rate_plan(num_steps: int, *, start: float = 1.7e9) -> LearningRatePlan:
    """Return what the schedule of `training_events` was going to do in half as many steps more."""
    steps = tuple(range(1, 3 * num_steps // 2))
    return LearningRatePlan(0, 1, start, steps, tuple(_rate(step, num_steps) for step in steps))


def memory_snapshot(rank: int, step: int, *, start: float = 1.7e9) -> MemorySnapshot:
    """Return the blocks of a device that never was, with crumbs between the large ones."""
    noise = random.Random(rank)
    segments: list[dict[str, Any]] = []
    for index in range(12):
        states = noise.choices(("active_allocated", "inactive", "active_pending_free"), (8, 3, 1), k=3 + index)
        sizes = [noise.choice((1, 2, 8, 24, 96)) * MIB for _ in states]
        if index == 5:
            states += ["active_allocated", "inactive"] * 400
            sizes += [MIB // 16] * 800
        blocks = [{"size": size, "state": state} for size, state in zip(sizes, states, strict=True)]
        segments.append({"device": 0, "total_size": sum(sizes), "blocks": blocks})
    found = condense_snapshot(segments, 0)
    holders = {
        "weights, gradients and optimizer state of blocks.*.mlp": 460 * MIB,
        "weights, gradients and optimizer state of blocks.*.attention": 310 * MIB,
        "losses (line 12)": 96 * MIB,
        "<b>cache</b> (line 3)": 24 * MIB,
    }
    return MemorySnapshot(
        rank=rank,
        step=step,
        time=start,
        num_segments=found.num_segments,
        reserved=found.reserved,
        in_use=found.in_use,
        largest_free=found.largest_free,
        segments=found.segments,
        blocks=tuple(number for block in found.blocks for number in block),
        holders=tuple(holders),
        holder_bytes=tuple(holders.values()),
    )


def _rate(step: int, num_steps: int) -> float:
    return 1e-3 * min(1.0, 10 * step / num_steps) * max(0.0, 1 - 0.6 * step / num_steps)


def _memory(rank: int, step: int, time: float, noise: random.Random) -> MemorySample:
    return MemorySample(
        rank=rank,
        step=step,
        time=time,
        parameters=96 * MIB,
        gradients=96 * MIB if step % 10 or step < 10 else 0,
        optimizer=0 if step < 2 else 192 * MIB,
        other=int((60 + 50 * noise.random()) * MIB),
        cached=min(step, 40) * MIB,
        free=20 * 1024 * MIB,
    )
