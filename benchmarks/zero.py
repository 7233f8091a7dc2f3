"""What does a step by DeepSpeed cost beyond DeepSpeed driven by hand?

Two gloo ranks train copies of one transformer in both ways and two stages, blocks in a random order: forward, backward,
clip, AdamW. Wall time of rank 0. DeepSpeed's collectives over shared memory, which it compiles on its first start, are
left out of both.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.measure import Figure, Report, main, on_two_ranks, quantile, quiet_difference
from benchmarks.sharding import QUIET, STEPS, Way, make_network, run_rank, train_ours

STAGES = (2, 3)


def zero(quick: bool = False) -> Report:
    """Measure with two ranks and report what a step costs."""
    rounds = 10 if quick else 40
    times = on_two_ranks("benchmarks.zero", rounds)["times"]
    report = Report(
        "DeepSpeed",
        f"A step of a transformer under ZeRO, clipped, with AdamW (2 gloo ranks, {rounds} rounds of {STEPS} steps).",
        ["", "wall ms/step"],
    )
    walls = {name: quantile(found, QUIET) for name, found in times.items()}
    for name, wall in walls.items():
        report.add(name, wall)
    for stage in STAGES:
        hand, ours = _names(stage)
        _, low, high = quiet_difference(times[ours], times[hand], QUIET)
        spread = (1 + low / walls[hand], 1 + high / walls[hand])
        ratio = walls[ours] / walls[hand]
        report.figures.append(Figure(f"stage {stage}: wall per step over hand-driven", ratio, 1.02, "x", spread=spread))
    return report


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
        run_rank(int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), _ways)
    else:
        main(zero)
