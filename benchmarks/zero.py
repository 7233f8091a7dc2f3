"""What does a step by DeepSpeed cost beyond DeepSpeed driven by hand?

Two gloo ranks train copies of one transformer in both ways and two stages: forward, backward, clip, AdamW. The ways
take turns of a single step, in a random order, so that other load on the machine affects all of them alike. Wall and
processor time of rank 0. DeepSpeed's collectives over shared memory, which it compiles on its first start, are left out
of both.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import Figure, Report, main, on_two_ranks, quantile
from benchmarks.sharding import Way, make_network, run_rank, train_ours

STAGES = (2, 3)


def zero(quick: bool = False) -> Report:
    """Measure with two ranks and report what a step costs."""
    rounds = 40 if quick else 200
    measured = on_two_ranks("benchmarks.zero", rounds)
    times, busy = measured["times"], measured["busy"]
    report = Report(
        "DeepSpeed",
        f"A step of a transformer under ZeRO, clipped, with AdamW (2 gloo ranks, {rounds} turns of a step; mean of the "
        "quieter half).",
        ["", "wall ms/step", "processor ms/step"],
    )
    for name, found in times.items():
        report.add(name, quiet_mean(found), quiet_mean(busy[name]))
    for stage in STAGES:
        hand, ours = _names(stage)
        ratio, *spread = quiet_ratio(times[ours], times[hand])
        what = f"stage {stage}: wall per step over hand-driven"
        report.figures.append(Figure(what, ratio, 1.02, "x", spread=(spread[0], spread[1])))
    return report


def quiet_mean(values: Sequence[float]) -> float:
    """Return the mean of the lower half of the values: less scattered than any one quantile of them."""
    return statistics.fmean(sorted(values)[: max(1, len(values) // 2)])


def quiet_ratio(own: Sequence[float], base: Sequence[float], draws: int = 1000) -> tuple[float, float, float]:
    """Return the ratio of the quiet means, and its 95 % bootstrap interval, drawn from whole rounds."""
    drawer, found = random.Random(0), []
    for _ in range(draws):
        chosen = drawer.choices(range(len(own)), k=len(own))
        found.append(quiet_mean([own[place] for place in chosen]) / quiet_mean([base[place] for place in chosen]))
    return quiet_mean(own) / quiet_mean(base), quantile(found, 0.025), quantile(found, 0.975)


def _names(stage: int) -> tuple[str, str]:
    return f"hand-driven DeepSpeed, stage {stage}", f"accel_nb, stage {stage}"


def _ways() -> dict[str, Way]:
    ways: dict[str, Way] = {}
    for stage in STAGES:
        hand, ours = _names(stage)
        run, *_ = train_ours("deepspeed", {"deepspeed": {"zero_stage": stage}})  # first: it opens DeepSpeed for both
        ways[ours] = Way(run, int)
        ways[hand] = Way(_by_hand(stage), int)
    return ways


def _by_hand(stage: int) -> Any:
    import deepspeed
    import torch
    from torch.nn.functional import cross_entropy

    model, tokens, targets = make_network()
    count = sum(value.numel() for value in model.parameters())
    config = {
        "train_micro_batch_size_per_gpu": len(tokens),
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": count, "allgather_bucket_size": count},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine: Any = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

    def by_hand(count: int) -> None:
        for _ in range(count):
            loss = cross_entropy(engine(tokens).flatten(0, 1), targets.flatten())
            engine.backward(loss)
            engine.step()
            loss.item()

    return by_hand


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        run_rank(int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), _ways, warm_up=0, steps=1)
    else:
        main(zero)
