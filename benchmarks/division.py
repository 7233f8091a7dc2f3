"""What does it cost a plain cell that its models divide whole batches, instead of each worker reading its share?

Two gloo ranks train copies of a classifier of 1,000 classes in both ways, and evaluate it, blocks in a random order.
Division is compared with one process that evaluates alone while the other rank waits.
"""

from __future__ import annotations

import json
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

DATA, MODEL = "workers read shares", "models compute rows"
ALONE, DIVIDED = "evaluation by one process", "evaluation by two workers"
QUIET = 0.2
STEPS = 10
BATCH = 64
CLASSES = 1000
# Batch size and classes of the evaluation, in which computing dominates.
LARGE_BATCH, FEW = 2048, 10


def division(quick: bool = False) -> Report:
    """Measure with two ranks and report what a step and an evaluation take."""
    rounds = 8 if quick else 40
    measured = on_two_ranks("benchmarks.division", rounds)
    report = Report(
        "Model division",
        f"A step of a classifier of {CLASSES:,} classes in a plain cell (batch {BATCH}, "
        f"{measured['parameters'] / 1e6:.1f} million parameters, SGD), and an evaluation of one of {FEW} classes by "
        f"batches of {LARGE_BATCH} (2 gloo ranks, {rounds} rounds of {STEPS} steps or batches).",
        ["", "wall ms/step or batch"],
    )
    walls = {name: quantile(times, QUIET) for name, times in measured["times"].items()}
    for name, wall in walls.items():
        report.add(name, wall)
    for what, name, base, limit in (
        ("step, models compute rows over workers read shares", MODEL, DATA, 1.05),
        ("evaluation, two workers over one process", DIVIDED, ALONE, 0.6),
    ):
        _, low, high = quiet_difference([measured["times"][name]], [measured["times"][base]], QUIET)
        spread = (1 + low / walls[base], 1 + high / walls[base])
        report.figures.append(Figure(what, walls[name] / walls[base], limit, "x", spread=spread))
    return report


def _rank(rank: int, folder: Path, rounds: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    group = open_group(rank, folder)
    try:
        torch.manual_seed(0)
        ways = {DATA: _training(rank, "data"), MODEL: _training(rank, "model"), **_evaluations(rank)}
        times: dict[str, list[float]] = {name: [] for name in ways}
        for order in shuffled_rounds(list(ways), rounds):
            for name in order:
                ways[name](2)
                dist.barrier()
                started = time.perf_counter()
                ways[name](STEPS)
                dist.barrier()
                times[name].append((time.perf_counter() - started) / STEPS * 1e3)
        if rank == 0:
            count = sum(value.numel() for value in _network(CLASSES).parameters())
            (folder / "0.json").write_text(json.dumps({"times": times, "parameters": count}))
        dist.barrier()
    finally:
        group.close()


def _network(classes: int) -> Any:
    from torch import nn

    layers = nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, classes)
    return nn.Sequential(*layers)


def _loader(num_batches: int, batch: int, classes: int) -> Any:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    count = num_batches * batch
    return DataLoader(TensorDataset(torch.randn(count, 256), torch.randint(classes, (count,))), batch_size=batch)


def _make_plain_cells(rank: int, divide: str) -> tuple[Any, Any]:
    """Return an accelerator's plain cells, and a function that prepares objects for them by name."""
    from accel_nb.accelerator import Accelerator
    from accel_nb.accelerator.plain_cells.autoprepare import PlainCells
    from accel_nb.runtime.distributed.communicator import TorchComm
    from accel_nb.runtime.distributed.process_group import DefaultGroup
    from accel_nb.runtime.world import World

    world = World(rank, 2, rank, 2, "cpu")
    comm = TorchComm(world, DefaultGroup.adopt(world))
    cells = PlainCells(Accelerator(world=world, comm=comm, config={"divide": divide}))
    return cells, lambda **objects: cells.prepare(objects, list(objects))


def _training(rank: int, divide: str) -> Callable[[int], None]:
    import torch
    from torch.nn.functional import cross_entropy

    model, loader = _network(CLASSES), _loader(STEPS + 2, BATCH, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    cells, prepare = _make_plain_cells(rank, divide)
    prepare(model=model, optimizer=optimizer, loader=loader)

    def run(count: int) -> None:
        with cells.run_cell():
            for number, (x, y) in enumerate(loader):
                if number == count:
                    break
                cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()

    return run


def _evaluations(rank: int) -> dict[str, Callable[[int], None]]:
    import torch

    model, loader = _network(FEW), _loader(STEPS, LARGE_BATCH, FEW)
    alone, optimizer = _network(FEW), torch.optim.SGD(model.parameters(), lr=0.01)
    cells, prepare = _make_plain_cells(rank, "model")
    prepare(model=model, optimizer=optimizer)
    batches = list(loader)

    def evaluate(network: Any, count: int) -> None:
        right = 0
        with torch.no_grad():
            for x, y in batches[:count]:
                right += int((network(x).argmax(1) == y).sum())

    def divided(count: int) -> None:
        with cells.run_cell():
            evaluate(model, count)

    return {ALONE: lambda count: evaluate(alone, count) if rank == 0 else None, DIVIDED: divided}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        _rank(int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
    else:
        main(division)
