"""Does `LeanDdp` gain with the installed version of torch?

It uses what torch does not document. It is compared with torch's own way in blocks that take turns in one run. Run this
with the oldest and the newest torch that is supported too.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measure import Figure, Report, main, median_interval, on_two_ranks, open_group, shuffled_rounds

LEAN, PLAIN = "LeanDdp", "torch's DDP"
STEPS = 50


def private_ways(quick: bool = False) -> Report:
    """Measure with two ranks, and report the ratio to torch's own way."""
    import torch

    pairs, rounds = (1, 20) if quick else (4, 40)
    steps: dict[str, list[float]] = {LEAN: [], PLAIN: []}
    for _ in range(pairs):
        for name, values in on_two_ranks("benchmarks.private_ways", rounds).items():
            steps[name] += values
    report = Report(
        "Private ways",
        f"What private names of torch gain, with torch {torch.__version__}: processor time of a training step (2 gloo "
        "ranks, 3 small layers, rank 0's training thread). Medians.",
        ["", "us", "over torch's own way", "95 % interval"],
    )
    ratios = [ours / theirs for ours, theirs in zip(steps[LEAN], steps[PLAIN], strict=True)]
    low, high = median_interval(ratios)
    report.add(PLAIN, statistics.median(steps[PLAIN]), 1.0, "")
    report.add(LEAN, statistics.median(steps[LEAN]), statistics.median(ratios), f"{low:.3f} to {high:.3f}")
    what = "LeanDdp: CPU per step over torch's DDP"
    report.figures.append(Figure(what, statistics.median(ratios), 1.0, "x", spread=(low, high)))
    return report


def _rank(rank: int, folder: Path, rounds: int) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from accel_nb.strategies.ddp.lean_ddp import LeanDdp

    torch.set_num_threads(1)
    group = open_group(rank, folder)
    x, y = torch.randn(8, 16), torch.randint(0, 4, (8,))

    def build(kind: Any) -> Callable[[int], None]:
        network = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
        model = kind(network, gradient_as_bucket_view=True)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.01)

        def run(steps: int) -> None:
            for _ in range(steps):
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()

        return run

    ways = {LEAN: build(LeanDdp), PLAIN: build(DistributedDataParallel)}
    for run in ways.values():
        run(60)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for order in shuffled_rounds(list(ways), rounds):
        for name in order:
            dist.barrier()
            began = time.thread_time()
            ways[name](STEPS)
            times[name].append((time.thread_time() - began) / STEPS * 1e6)
    if rank == 0:
        (folder / "0.json").write_text(json.dumps(times))
    dist.barrier()
    group.close()


if __name__ == "__main__":
    if "--rank" in sys.argv:
        _rank(int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
    else:
        main(private_ways)
