"""What do accumulation, schedules, clipping and exact metrics cost beyond hand-written DDP?

Two gloo ranks train copies of one network in every way, blocks in a random order. Three recipes: windows of two
batches with a schedule; clipping and a gathered metric in every step; and a network whose step takes about 5 ms, for
the wall time of forward and backward. Processor time of all threads of rank 0, lower quintile of the blocks.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measure import (
    Figure,
    Report,
    main,
    on_two_ranks,
    open_group,
    quantile,
    quiet_difference,
    shuffled_rounds,
)

HAND, OURS, PEER = "hand-written DDP", "accel_nb", "accelerate"
WINDOWS, METRICS, LARGE = "accumulate 2 and schedule", "clip and gathered metric", "forward and backward of 5 ms"
QUIET = 0.2
CPU, WALL = 0, 1
STEPS = 40


def facade_cost(quick: bool = False) -> Report:
    """Measure with two ranks and report what each recipe costs."""
    pairs, rounds = (2, 10) if quick else (5, 20)
    measured = [on_two_ranks("benchmarks.facade_cost", rounds) for _ in range(pairs)]

    def blocks(name: str, what: int) -> list[list[float]]:
        return [[block[what] for block in times[name]] for times in measured]

    def quiet(name: str, what: int) -> float:
        return statistics.fmean(quantile(own, QUIET) for own in blocks(name, what))

    report = Report(
        "Facade cost",
        f"A training step with what people use beside backward and step (2 gloo ranks, {pairs} pairs of processes with "
        f"{rounds} rounds of {STEPS} steps).",
        ["", "CPU us/step", "extra CPU us", "95 % interval", "wall us/step"],
    )
    extra: dict[str, tuple[float, ...]] = {}
    for recipe in (WINDOWS, METRICS, LARGE):
        base = blocks(f"{recipe}: {HAND}", CPU)
        for name in (f"{recipe}: {way}" for way in (HAND, OURS, PEER)):
            extra[name] = value, low, high = quiet_difference(blocks(name, CPU), base, QUIET)
            spread = "" if name.endswith(HAND) else f"{low:.1f} to {high:.1f}"
            report.add(name, quiet(name, CPU), value, spread, quiet(name, WALL))
    value, *spread = extra[f"{WINDOWS}: {OURS}"]
    report.figures.append(Figure(f"{WINDOWS}: extra CPU per step", value, 20, "us", spread=(spread[0], spread[1])))
    value, *spread = extra[f"{METRICS}: {OURS}"]
    over = extra[f"{METRICS}: {PEER}"][0]
    report.figures.append(
        Figure(f"{METRICS}: extra CPU over that of accelerate", value / over, 0.3, "x",
               spread=(spread[0] / over, spread[1] / over))
    )  # fmt: skip
    walls = {name: quiet(f"{LARGE}: {name}", WALL) for name in (HAND, OURS)}
    report.figures.append(Figure(f"{LARGE}: wall over plain DDP", walls[OURS] / walls[HAND], 1.01, "x"))
    report.notes.append("The metric is gathered in every step, by hand with one all_gather_into_tensor.")
    return report


def _rank(rank: int, folder: Path, rounds: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    group = open_group(rank, folder)
    try:
        ways = {**_windows(), **_metrics(), **_large()}
        for run in ways.values():
            run(40)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for order in shuffled_rounds(list(ways), rounds):
            for name in order:
                ways[name](4)
                dist.barrier()
                cpu, wall = time.process_time(), time.perf_counter()
                ways[name](STEPS)
                cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
                times[name].append((cpu / STEPS * 1e6, wall / STEPS * 1e6))
        if rank == 0:
            (folder / "0.json").write_text(json.dumps(times))
        dist.barrier()
    finally:
        group.close()


Run = Callable[[int], None]


def _contestants(network: Any, **options: Any) -> tuple[tuple[Any, Any, Any], ...]:
    """Return (model, optimizer, accelerator) by hand, with ours and with the peer's, each with its own copy."""
    import torch
    from accelerate import Accelerator as Peer
    from torch.nn.parallel import DistributedDataParallel

    from accel_nb import Accelerator

    def fresh() -> tuple[Any, Any]:
        model = copy.deepcopy(network)
        return model, torch.optim.SGD(model.parameters(), lr=0.001)

    model, optimizer = fresh()
    by_hand = DistributedDataParallel(model, gradient_as_bucket_view=True), optimizer, None
    ours = Accelerator(cpu=True, **options)
    peer = Peer(cpu=True, **options)
    return by_hand, (*ours.prepare(*fresh()), ours), (*peer.prepare(*fresh()), peer)


def _network(width: int) -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))


def _windows() -> dict[str, Run]:
    import torch
    from torch.nn.functional import cross_entropy

    x, y = torch.randn(8, 16), torch.randint(0, 4, (8,))
    by_hand, ours, peer = _contestants(_network(32), gradient_accumulation_steps=2)

    def schedule(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999999)

    hand_schedule = schedule(by_hand[1])

    def hand(count: int) -> None:
        model, optimizer, _ = by_hand
        for number in range(count):
            if number % 2 == 0:
                with model.no_sync():
                    (cross_entropy(model(x), y) / 2).backward()
            else:
                (cross_entropy(model(x), y) / 2).backward()
                optimizer.step()
                hand_schedule.step()
                optimizer.zero_grad()

    def with_accelerator(model: Any, optimizer: Any, accelerator: Any) -> Run:
        scheduler = accelerator.prepare(schedule(optimizer if accelerator is ours[2] else optimizer.optimizer))

        def run(count: int) -> None:
            for _ in range(count):
                with accelerator.accumulate(model):
                    accelerator.backward(cross_entropy(model(x), y))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()

        return run

    return {
        f"{WINDOWS}: {HAND}": hand,
        f"{WINDOWS}: {OURS}": with_accelerator(*ours),
        f"{WINDOWS}: {PEER}": with_accelerator(*peer),
    }


def _metrics() -> dict[str, Run]:
    import torch
    import torch.distributed as dist
    from torch.nn.functional import cross_entropy
    from torch.nn.utils.clip_grad import clip_grad_norm_

    x, y = torch.randn(8, 16), torch.randint(0, 4, (8,))
    by_hand, ours, peer = _contestants(_network(32))

    def hand(count: int) -> None:
        model, optimizer, _ = by_hand
        for _ in range(count):
            output = model(x)
            cross_entropy(output, y).backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            whole = torch.empty(16, 4)
            dist.all_gather_into_tensor(whole, output.detach())

    def with_accelerator(model: Any, optimizer: Any, accelerator: Any) -> Run:
        def run(count: int) -> None:
            for _ in range(count):
                output = model(x)
                accelerator.backward(cross_entropy(output, y))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                accelerator.gather_for_metrics(output)

        return run

    return {
        f"{METRICS}: {HAND}": hand,
        f"{METRICS}: {OURS}": with_accelerator(*ours),
        f"{METRICS}: {PEER}": with_accelerator(*peer),
    }


def _large() -> dict[str, Run]:
    import torch

    x = torch.randn(64, 16)
    by_hand, ours, peer = _contestants(_network(640))

    def hand(count: int) -> None:
        for _ in range(count // 4):
            by_hand[0](x).square().mean().backward()
            by_hand[1].zero_grad()

    def with_accelerator(model: Any, optimizer: Any, accelerator: Any) -> Run:
        def run(count: int) -> None:
            for _ in range(count // 4):
                accelerator.backward(model(x).square().mean())
                optimizer.zero_grad()

        return run

    return {
        f"{LARGE}: {HAND}": hand,
        f"{LARGE}: {OURS}": with_accelerator(*ours),
        f"{LARGE}: {PEER}": with_accelerator(*peer),
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        _rank(int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
    else:
        main(facade_cost)
