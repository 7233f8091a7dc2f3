"""What does a batch of a prepared loader cost, and the start of its epoch?

Two gloo ranks iterate loaders and do nothing else. Each rank gets 8 samples a step: from a plain loader over half of
the data, from one with torch's DistributedSampler, and from prepared loaders. Blocks alternate in a random order;
processor time of rank 0's thread, lower quintile of the blocks.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.measure import Figure, Report, main, on_two_ranks, open_group, quantile, shuffled_rounds

QUIET = 0.2
STEPS = 400
PLAIN, SAMPLER = "plain loader of half the data", "DistributedSampler"
GLOBAL, SHUFFLED, PER_WORKER = "accel_nb, batch of all", "accel_nb, batch of all, shuffled", "accel_nb, batch of each"
PEER, PEER_SPLIT = "accelerate, batch of each", "accelerate, split_batches"
STREAM, PEER_STREAM = "accel_nb, dispatched stream", "accelerate, dispatched stream"


def loader_cost(quick: bool = False) -> Report:
    """Measure with two ranks and report what a batch and the start of an epoch cost."""
    rounds = 8 if quick else 40
    times = on_two_ranks("benchmarks.loader_cost", rounds)
    report = Report(
        "Loader cost",
        f"Processor time of a batch of 8 samples in 2 tensors, and of an epoch's first one, which does what an epoch "
        f"starts with (2 gloo ranks, no worker processes, {rounds} epochs of {STEPS} batches each).",
        ["", "CPU us/batch", "over the plain loader", "first batch, CPU us", "wall us/batch"],
    )
    batch = {name: quantile([own[0] for own in rows], QUIET) for name, rows in times.items()}
    for name, rows in times.items():
        first, wall = (quantile([own[at] for own in rows], QUIET) for at in (1, 2))
        report.add(name, batch[name], f"{batch[name] / batch[PLAIN]:.2f} x", first, wall)
    for name in (GLOBAL, SHUFFLED, PER_WORKER):
        report.figures.append(Figure(f"{name}: over the plain loader", batch[name] / batch[PLAIN], 1.0, "x"))
    report.figures.append(Figure(f"{STREAM}: over that of accelerate", batch[STREAM] / batch[PEER_STREAM], 1.0, "x"))
    return report


def _rank(rank: int, folder: Path, rounds: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    group = open_group(rank, folder)
    try:
        ways = _ways(rank)
        for loader in ways.values():
            _epoch(loader)
        times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
        for order in shuffled_rounds(list(ways), rounds):
            for name in order:
                dist.barrier()
                times[name].append(_epoch(ways[name]))
        if rank == 0:
            (folder / "0.json").write_text(json.dumps(times))
        dist.barrier()
    finally:
        group.close()


def _epoch(loader: Iterable[Any]) -> tuple[float, float, float]:
    """Return processor time of a batch and of the first one, and wall time of a batch, in microseconds."""
    start, started = time.thread_time(), time.perf_counter()
    batches = iter(loader)
    next(batches)
    first, count = time.thread_time(), 1
    for _ in batches:
        count += 1
    end, ended = time.thread_time(), time.perf_counter()
    return (end - start) / count * 1e6, (first - start) * 1e6, (ended - started) / count * 1e6


def _ways(rank: int) -> dict[str, Iterable[Any]]:
    import torch
    from accelerate import Accelerator as Peer
    from accelerate.utils import DataLoaderConfiguration as PeerConfiguration
    from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

    from accel_nb.accelerator import Accelerator
    from accel_nb.runtime.distributed.communicator import TorchComm
    from accel_nb.runtime.distributed.process_group import DefaultGroup
    from accel_nb.runtime.world import World

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(data)

    torch.manual_seed(0)
    data = TensorDataset(torch.randn(16 * STEPS, 16), torch.randint(0, 4, (16 * STEPS,)))
    half = TensorDataset(*(tensor[: 8 * STEPS] for tensor in data.tensors))
    world = World(rank, 2, rank, 2, "cpu")
    comm = TorchComm(world, DefaultGroup.adopt(world))
    ours = Accelerator(world=world, comm=comm)
    ours_global = Accelerator(world=world, comm=comm, batch="global")
    peer = Peer(cpu=True)
    split = Peer(cpu=True, dataloader_config=PeerConfiguration(split_batches=True))
    dispatching = Peer(cpu=True, dataloader_config=PeerConfiguration(dispatch_batches=True))
    return {
        PLAIN: DataLoader(half, batch_size=8),
        SAMPLER: DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=False)),
        GLOBAL: ours_global.prepare(DataLoader(data, batch_size=16)),
        SHUFFLED: ours_global.prepare(DataLoader(data, batch_size=16, shuffle=True)),
        PER_WORKER: ours.prepare(DataLoader(data, batch_size=8)),
        PEER: peer.prepare(DataLoader(data, batch_size=8)),
        PEER_SPLIT: split.prepare(DataLoader(data, batch_size=16)),
        STREAM: ours.prepare(DataLoader(Stream(), batch_size=8)),
        PEER_STREAM: dispatching.prepare(DataLoader(Stream(), batch_size=8)),
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        _rank(int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
    else:
        main(loader_cost)
