"""What does a mesh cost beyond hand-written tensor parallelism, pipelines and DDP?

Two gloo ranks train copies of one transformer in all ways, by turns of a single step in a random order: forward,
backward, AdamW. Hand-written are `parallelize_module`, a `ScheduleGPipe` over two halves of the blocks, and DDP, beside
which all dimensions have size 1. Wall time of rank 0.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.measure import Figure, Report, main, on_two_ranks
from benchmarks.sharding import Way, run_rank
from benchmarks.zero import quiet_mean, quiet_ratio

HEADS, WIDTH, DEPTH, VOCABULARY, LENGTH, BATCH = 4, 192, 4, 256, 32, 32
STAGES, MICRO_BATCHES = 2, 8
BUBBLE = (STAGES - 1) / MICRO_BATCHES

TENSOR, PIPELINE, SIZE_1 = "tensor parallel", "pipeline", "dimensions of size 1"
HAND = {TENSOR: "parallelize_module", PIPELINE: "ScheduleGPipe", SIZE_1: "DDP"}
OURS = {
    f"{TENSOR}, plain loop": (TENSOR, 1.05),
    f"{PIPELINE}, plain loop": (PIPELINE, 1.15 * (1 + BUBBLE)),
    f"{PIPELINE}, accelerator.pipeline": (PIPELINE, 1.15 * (1 + BUBBLE)),
    f"{SIZE_1}, plain loop": (SIZE_1, 1.02),
}


def mesh(quick: bool = False) -> Report:
    """Measure with two ranks and report what a step costs."""
    rounds = 20 if quick else 80
    measured = on_two_ranks("benchmarks.mesh", rounds)
    times, busy = measured["times"], measured["busy"]
    report = Report(
        "Mesh",
        f"A step of a transformer of {DEPTH} blocks and width {WIDTH} with AdamW, {BATCH} sequences of {LENGTH} tokens "
        f"in all, in a pipeline {MICRO_BATCHES} micro-batches (2 gloo ranks, {rounds} turns of a step; mean of the "
        "quieter half).",
        ["", "wall ms/step", "processor ms/step"],
    )
    for name, found in times.items():
        report.add(name, quiet_mean(found), quiet_mean(busy[name]))
    for name, (dimension, limit) in OURS.items():
        ratio, low, high = quiet_ratio(times[name], times[HAND[dimension]])
        what = f"{name}: wall per step over {HAND[dimension]}"
        report.figures.append(Figure(what, ratio, limit, "x", spread=(low, high)))
    report.notes.append(f"a pipeline of {STAGES} stages waits for {BUBBLE:.1%} of its time: 1.15 x (1 + that)")
    return report


def _ways() -> Mapping[str, Way]:
    runs: dict[str, Callable[[int], None]] = {
        HAND[TENSOR]: _tensor_by_hand(),
        f"{TENSOR}, plain loop": _ours({"tp": 2}),
        HAND[PIPELINE]: _pipeline_by_hand(),
        f"{PIPELINE}, plain loop": _ours({"pp": 2, "micro_batches": MICRO_BATCHES}),
        f"{PIPELINE}, accelerator.pipeline": _ours({"pp": 2, "micro_batches": MICRO_BATCHES}, has_schedule=True),
        HAND[SIZE_1]: _ddp_by_hand(),
        f"{SIZE_1}, plain loop": _ours({"pp": 1, "cp": 1, "tp": 1, "ep": 1}),
    }
    return {name: Way(run, int) for name, run in runs.items()}


def _ours(sizes: dict[str, int], *, has_schedule: bool = False) -> Callable[[int], None]:
    import torch

    from accel_nb import Accelerator

    model, tokens, targets = _make_network()
    accelerator = Accelerator(cpu=True, strategy="ddp", config={"mesh": sizes})
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
    accelerator.prepare(model, optimizer)
    share = accelerator.components.data_world
    tokens, targets = tokens[share.rank :: share.size], targets[share.rank :: share.size]
    if has_schedule:
        pipeline = accelerator.pipeline(model, _loss, schedule="gpipe")
        return _loop(optimizer, lambda: pipeline.step(tokens, target=targets))

    def compute() -> Any:
        loss = _loss(model(tokens), targets)
        accelerator.backward(loss)
        return loss

    return _loop(optimizer, compute)


def _tensor_by_hand() -> Callable[[int], None]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, tokens, targets = _make_network()
    plan = {
        "attention.q": ColwiseParallel(), "attention.k": ColwiseParallel(), "attention.v": ColwiseParallel(),
        "attention.out": RowwiseParallel(), "mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel(),
    }  # fmt: skip
    devices = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        block.attention.num_heads //= 2
        parallelize_module(block, devices, plan)
    return _plain_loop(model, torch.optim.AdamW(model.parameters(), lr=1e-4), tokens, targets)


def _ddp_by_hand() -> Callable[[int], None]:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    model, tokens, targets = _make_network()
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    rank = dist.get_rank()
    return _plain_loop(wrapped, torch.optim.AdamW(model.parameters(), lr=1e-4), tokens[rank::2], targets[rank::2])


def _pipeline_by_hand() -> Callable[[int], None]:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    model, tokens, targets = _make_network()
    rank, half = dist.get_rank(), DEPTH // 2
    parts: list[list[Any]] = [[model.embed, *model.blocks[:half]], [*model.blocks[half:], model.norm, model.head]]
    own = nn.Sequential(*parts[rank])
    stage = PipelineStage(own, rank, STAGES, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=_loss)

    def compute() -> Any:
        if rank == 0:
            schedule.step(tokens)
            return None
        losses: list[Any] = []
        schedule.step(target=targets, losses=losses)
        return torch.stack(losses).mean()

    return _loop(torch.optim.AdamW(own.parameters(), lr=1e-4), compute)


def _plain_loop(model: Any, optimizer: Any, tokens: Any, targets: Any) -> Callable[[int], None]:
    def compute() -> Any:
        loss = _loss(model(tokens), targets)
        loss.backward()
        return loss

    return _loop(optimizer, compute)


def _loop(optimizer: Any, compute: Callable[[], Any]) -> Callable[[int], None]:
    """Return a function that runs steps; ``compute`` leaves the gradients of a batch, and returns its loss."""

    def run(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            loss = compute()
            optimizer.step()
            if loss is not None:
                loss.item()

    return run


def _loss(output: Any, targets: Any) -> Any:
    from torch.nn.functional import cross_entropy

    return cross_entropy(output.flatten(0, 1), targets.flatten())


def _make_network() -> tuple[Any, Any, Any]:
    """Return the network that every way trains a copy of, a batch of tokens and their targets."""
    import torch
    from torch import Tensor, nn
    from torch.nn.functional import scaled_dot_product_attention

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_heads = HEADS
            self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            batch, length, _ = x.shape
            q, k, v = (
                part(x).view(batch, length, self.num_heads, -1).transpose(1, 2) for part in (self.q, self.k, self.v)
            )
            mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.attention = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention()
            self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attention(self.first(x))
            return x + self.mlp(self.second(x))

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    torch.manual_seed(0)
    tokens, targets = torch.randint(VOCABULARY, (2, BATCH, LENGTH))
    return Network(), tokens, targets


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        run_rank(int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), _ways, warm_up=0, steps=1)
    else:
        main(mesh)
