"""Events of a training run that never happened: what the panel's tests draw."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from accel_nb.telemetry.events import Event, MemorySample, MetricLogged, Prepared, StepDone

MIB = 2**20


def training_events(
    num_steps: int, *, num_ranks: int = 2, step_s: float = 0.02, start: float = 1.7e9
) -> Iterator[Event]:
    """Yield a falling loss, a skipped step, a NaN, a slow last rank and a memory that fills in the first steps."""
    noise = random.Random(0)
    for rank in range(num_ranks):
        yield Prepared(rank, start, "cpu", "ddp", "no", ("model",), ())
    for step in range(1, num_steps + 1):
        time = start + step * step_s
        for rank in range(num_ranks):
            loss = 0.08 + 2.3 * math.exp(-5 * step / num_steps) * (1 + 0.12 * noise.gauss(0, 1))
            yield StepDone(
                rank=rank,
                step=step,
                time=time,
                loss=math.nan if step == num_steps // 3 else loss,
                learning_rate=1e-3 * min(1.0, 10 * step / num_steps) * (1 - step / (num_steps + 1)),
                step_s=step_s * (0.6 + 0.02 * noise.random() + (0.3 if rank == num_ranks - 1 and rank else 0)),
                num_samples=32,
                skipped=step == num_steps // 5,
            )
            if step % 5 == 0 or step < 6:
                yield _memory(rank, step, time, noise)
        if step % 50 == 0:
            yield MetricLogged(0, step, time, "accuracy", 1 - 0.9 * math.exp(-4 * step / num_steps))


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
