"""What does a model that is divided among workers cost beyond hand-written `fully_shard`?

Two gloo ranks train copies of one transformer in both ways, blocks in a random order: forward, backward, clip, AdamW.
Wall time of rank 0, and the bytes of its parameters, gradients and optimizer state between two steps.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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

HAND, OURS = "hand-written fully_shard", "accel_nb"
QUIET = 0.2
STEPS = 5


@dataclass(frozen=True)
class Way:
    """One way to train: a function that runs steps, and one that returns the bytes of this rank's training state."""

    run: Callable[[int], None]
    held: Callable[[], int]


def sharding(quick: bool = False) -> Report:
    """Measure with two ranks and report what a step costs, and what a rank holds."""
    rounds = 12 if quick else 60
    measured = on_two_ranks("benchmarks.sharding", rounds)
    times, held = measured["times"], measured["held"]
    report = Report(
        "Sharded training",
        f"A step of a divided transformer of {measured['parameters'] / 1e6:.1f} million parameters, clipped, with "
        f"AdamW (2 gloo ranks, {rounds} rounds of {STEPS} steps).",
        ["", "wall ms/step", "MB held by a rank"],
    )
    walls = {name: quantile(times[name], QUIET) for name in (HAND, OURS)}
    for name in (HAND, OURS):
        report.add(name, walls[name], held[name] / 1e6)
    _, low, high = quiet_difference([times[OURS]], [times[HAND]], QUIET)
    spread = (1 + low / walls[HAND], 1 + high / walls[HAND])
    report.figures += [
        Figure("wall per step over hand-written", walls[OURS] / walls[HAND], 1.02, "x", spread=spread),
        Figure("bytes held over hand-written", held[OURS] / held[HAND], 1.05, "x"),
    ]
    return report


def run_rank(
    rank: int,
    folder: Path,
    rounds: int,
    ways_of: Callable[[], Mapping[str, Way]],
    *,
    warm_up: int = 1,
    steps: int = STEPS,
) -> None:
    """Open the process group, train each way's copy in turn, and write rank 0's times and bytes to ``0.json``.

    A turn has ``warm_up`` steps that are not measured, and ``steps`` that are. Times are of one step, in ms: wall time,
    and processor time of this process.
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    group = open_group(rank, folder)
    try:
        ways = ways_of()
        for way in ways.values():
            way.run(3)
        times: dict[str, list[float]] = {name: [] for name in ways}
        busy: dict[str, list[float]] = {name: [] for name in ways}
        for order in shuffled_rounds(list(ways), rounds):
            for name in order:
                ways[name].run(warm_up)
                dist.barrier()
                started, used = time.perf_counter(), time.process_time()
                ways[name].run(steps)
                times[name].append((time.perf_counter() - started) / steps * 1e3)
                busy[name].append((time.process_time() - used) / steps * 1e3)
        held = {name: way.held() for name, way in ways.items()}
        if rank == 0:
            count = sum(value.numel() for value in make_network()[0].parameters())
            measured = {"times": times, "busy": busy, "held": held, "parameters": count}
            (folder / "0.json").write_text(json.dumps(measured))
        dist.barrier()
    finally:
        group.close()


def make_network() -> tuple[Any, Any, Any]:
    """Return the network that every way trains a copy of, a batch of tokens and their targets."""
    import torch

    from tests.support.transformer import Transformer

    torch.manual_seed(0)
    network = Transformer(vocabulary=256, width=192, depth=6, length=32)
    return network, torch.randint(256, (8, 32)), torch.randint(256, (8, 32))


def train_ours(strategy: str, config: dict[str, Any]) -> tuple[Callable[[int], None], Any, Any]:
    """Return a function that trains steps by a strategy of accel_nb, and the model and optimizer that it trains."""
    import torch
    from torch.nn.functional import cross_entropy

    from accel_nb import Accelerator

    model, tokens, targets = make_network()
    accelerator = Accelerator(cpu=True, strategy=strategy, config=config)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
    accelerator.prepare(model, optimizer)

    def run(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            loss.item()

    return run, model, optimizer


def _held(model: Any, optimizer: Any) -> int:
    from accel_nb.telemetry.memory import storage_bytes

    state = [value for entries in optimizer.state.values() for value in entries.values()]
    gradients = [value.grad for value in model.parameters() if value.grad is not None]
    return storage_bytes([*model.parameters(), *gradients, *state])


def _ways() -> dict[str, Way]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.functional import cross_entropy
    from torch.nn.utils.clip_grad import clip_grad_norm_

    model, tokens, targets = make_network()
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def by_hand(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            loss.item()

    ours, mine, own = train_ours("fsdp", {})
    return {
        HAND: Way(by_hand, lambda: _held(model, optimizer)),
        OURS: Way(ours, lambda: _held(mine, own)),
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        run_rank(int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), _ways)
    else:
        main(sharding)
