"""How much processor time does a training step cost beyond hand-written DDP?

Two gloo ranks train the same tiny network, so small that Python dominates, in every way; each way has its own copy of
it. Blocks of steps alternate in a random order inside of each round. What is measured is the processor time of the
process, with gloo's threads; other work on the machine can only add to it, so the quietest fifth of the blocks of each
way counts.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
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

HAND, EXPLICIT, PLAIN, PEER = "hand-written DDP", "accel_nb, explicit", "accel_nb, plain cell", "accelerate"
WITH_LOADER = ", with loader"
QUIET = 0.2
CPU, WALL = 0, 1
STEPS = 50
"""Steps in a block; with a loader also the length of its epoch, so that the start of an epoch is measured."""
NUM_WARM_UP = 15
"""Steps before a block that are not measured: Python specialises code again when a plain cell begins."""


def step_overhead(quick: bool = False) -> Report:
    """Measure with two ranks and report the extra time of each way."""
    pairs, rounds = (2, 12) if quick else (6, 20)
    measured = [on_two_ranks("benchmarks.step_overhead", rounds) for _ in range(pairs)]

    def blocks(name: str, what: int) -> list[list[float]]:
        return [[block[what] for block in times[name]] for times in measured]

    report = Report(
        "Step overhead",
        f"Extra processor time of a training step over hand-written DDP (2 gloo ranks, a network of 3 small layers, "
        f"{pairs} pairs of processes with {rounds} rounds of {STEPS} steps; all threads of rank 0, lower quintile "
        "of the blocks of each, mean of the pairs).",
        ["", "CPU us/step", "extra CPU us", "95 % interval", "wall us/step", "extra wall us"],
    )
    for suffix in ("", WITH_LOADER):
        extra: dict[str, tuple[float, ...]] = {}
        for name in (HAND, EXPLICIT, PLAIN, PEER):
            cpus, walls = blocks(name + suffix, CPU), blocks(name + suffix, WALL)
            extra[name] = value, low, high = quiet_difference(cpus, blocks(HAND + suffix, CPU), QUIET)
            report.add(
                name + suffix,
                statistics.fmean(quantile(own, QUIET) for own in cpus),
                value,
                "" if name == HAND else f"{low:.1f} to {high:.1f}",
                statistics.fmean(quantile(own, QUIET) for own in walls),
                quiet_difference(walls, blocks(HAND + suffix, WALL), QUIET)[0],
            )
        over = extra[PEER][0]
        for name in (EXPLICIT, PLAIN):
            value, low, high = extra[name]
            report.figures += [
                Figure(f"{name}{suffix}: extra CPU per step", value, 20, "us", spread=(low, high)),
                Figure(f"{name}{suffix}: extra CPU over that of accelerate", value / over, 0.15, "x",
                       spread=(low / over, high / over)),
            ]  # fmt: skip
    return report


def _rank(rank: int, folder: Path, rounds: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    group = open_group(rank, folder)
    try:
        ways = _ways(rank)
        for run, context in ways.values():
            with context():
                run(60)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for order in shuffled_rounds(list(ways), rounds):
            for name in order:
                run, context = ways[name]
                with context():
                    run(NUM_WARM_UP)
                    dist.barrier()
                    cpu, wall = time.process_time(), time.perf_counter()
                    run(STEPS)
                    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
                times[name].append((cpu / STEPS * 1e6, wall / STEPS * 1e6))
        if rank == 0:
            (folder / "0.json").write_text(json.dumps(times))
        dist.barrier()
    finally:
        group.close()


Way = tuple[Callable[[int], None], Callable[[], AbstractContextManager[Any]]]


def _ways(rank: int) -> dict[str, Way]:
    """Return every way to train: a function of the number of steps, and the context that it runs in."""
    import torch
    import torch.distributed as dist
    from accelerate import Accelerator as Peer
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    from accel_nb.accelerator import Accelerator
    from accel_nb.accelerator.plain_cells.autoprepare import PlainCells
    from accel_nb.runtime.distributed.communicator import TorchComm
    from accel_nb.runtime.distributed.process_group import DefaultGroup
    from accel_nb.runtime.world import World
    from accel_nb.telemetry.ring import RingWriter, create_ring

    class RingSink:
        """Writes events to a ring, as a worker's sink does in a cell."""

        def __init__(self) -> None:
            self._ring = RingWriter(create_ring())

        def emit(self, event: Any) -> None:
            if RingWriter.can_write(event):
                self._ring.write(event)

        def emit_step(self, *values: Any) -> None:
            self._ring.write_step(*values)

    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    x, y = torch.randn(8, 16), torch.randint(0, 4, (8,))
    data = TensorDataset(torch.randn(16 * STEPS, 16), torch.randint(0, 4, (16 * STEPS,)))
    world = World(rank, 2, rank, 2, "cpu")
    comm = TorchComm(world, DefaultGroup.adopt(world))
    criterion = nn.functional.cross_entropy
    ways: dict[str, Way] = {}

    def fresh() -> tuple[Any, Any]:
        model = copy.deepcopy(network)
        return model, torch.optim.SGD(model.parameters(), lr=0.01)

    def repeat(loader: Any) -> Callable[[int], Any]:
        """Return a function that yields ``count`` batches and starts epochs as needed."""

        def batches(count: int) -> Any:
            while count > 0:
                for batch in loader:
                    yield batch
                    count -= 1
                    if count == 0:
                        break

        return batches

    def no_loader(count: int) -> Any:
        for _ in range(count):
            yield x, y

    def add(name: str, batches: Callable[[int], Any], model: Any, optimizer: Any, backward: Any, context: Any) -> None:
        def through_accelerator(count: int) -> None:
            for inputs, targets in batches(count):
                backward(criterion(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()

        def as_written(count: int) -> None:
            for inputs, targets in batches(count):
                criterion(model(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()

        ways[name] = (as_written if backward is None else through_accelerator), context

    for suffix in ("", WITH_LOADER):
        model, optimizer = fresh()
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=False))
        add(HAND + suffix, repeat(loader) if suffix else no_loader, model, optimizer, None, nullcontext)

        model, optimizer = fresh()
        loader = DataLoader(data, batch_size=8)
        ours = Accelerator(world=world, comm=comm, sink=RingSink())
        if suffix:
            ours.prepare(model, optimizer, loader)
        else:
            ours.prepare(model, optimizer)
        add(EXPLICIT + suffix, repeat(loader) if suffix else no_loader, model, optimizer, ours.backward, nullcontext)

        model, optimizer = fresh()
        loader = DataLoader(data, batch_size=16)
        plain = Accelerator(world=world, comm=comm, sink=RingSink(), config={"divide": "data"})
        names = {"model": model, "optimizer": optimizer} | ({"loader": loader} if suffix else {})
        cells = PlainCells(plain)
        cells.prepare(names, list(names))
        # The context changes torch while it is active, so it is entered for each block.
        add(PLAIN + suffix, repeat(loader) if suffix else no_loader, model, optimizer, None, cells.run_cell)

        model, optimizer = fresh()
        loader = DataLoader(data, batch_size=8)
        peer = Peer(cpu=True)
        if suffix:
            model, optimizer, loader = peer.prepare(model, optimizer, loader)
        else:
            model, optimizer = peer.prepare(model, optimizer)
        add(PEER + suffix, repeat(loader) if suffix else no_loader, model, optimizer, peer.backward, nullcontext)
    dist.barrier()
    return ways


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        _rank(int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
    else:
        main(step_overhead)
