"""Cells whose blocks are computed in stages by several workers: the notebook's model is whole, and trained as alone."""

from __future__ import annotations

import pytest

from tests.notebook.cells import done, run
from tests.notebook.mesh_cells import SETUP

TRAIN = """
losses = []
model.train()
for x, y in loader:
    noise = torch.rand(())
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten()) * (1 + noise)
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    losses.append((loss.item(), norm.item()))
model.eval()
with torch.no_grad():
    predicted = model(x)
"""

FLAGS = "--cpus 4 --pp 2 --mesh.micro-batches 2"


@pytest.mark.nightly
def test_a_plain_cell_trains_as_on_one_process_also_after_a_worker_was_killed(kernel) -> None:
    setup = SETUP.replace("Dropout(0.2)", "Dropout(0.0)")
    assert kernel.run(setup + "model, optimizer, loader = build()\n" + TRAIN + TRAIN).error is None
    kept = "alone, alone_losses, alone_predicted = model, losses, predicted\nmodel, optimizer, loader = build()\n"
    assert kernel.run(kept + "mine, weight = model, model.blocks[1].attention.q.weight").error is None
    output = done(kernel, TRAIN, FLAGS)
    assert "mesh pp 2 x dp_replicate 2 (rank 3 is dp 1, pp 1), stages of 1 and 1 blocks" in output.receipt
    assert "batch 8 = 2 x 4 rows" in output.receipt
    read = run(kernel, "print(model.head.weight.sum().item())", FLAGS)
    assert read.error is not None
    assert "computes with parameters or gradients of a model in stages" in read.error[1]
    killed = run(kernel, "import os, signal\nif accelerator.process_index == 3:\n    os.kill(os.getpid(), 9)", FLAGS)
    assert killed.error is not None
    assert "rank 3" in killed.error[1]
    done(kernel, TRAIN, "--cpus 4 --pp 2 --tp 2")
    assert kernel.value("difference()") < 1e-9
    pairs = "(a - b for ours, theirs in zip(losses, alone_losses, strict=True) for a, b in zip(ours, theirs))"
    assert kernel.value(f"max(map(abs, {pairs}))") < 1e-9
    assert kernel.value("(predicted - alone_predicted).abs().max().item()") < 1e-9
    same = kernel.value("(mine is model, weight is model.blocks[1].attention.q.weight, type(weight) is nn.Parameter)")
    assert same == (True, True, True)
    assert kernel.value("model.head.weight is model.embed.weight")
    assert kernel.value("[tuple(state['exp_avg'].shape) for state in optimizer.state.values()][:2]") == [(11, 8), (8,)]


def test_what_does_not_fit_is_refused_before_anything_starts(kernel) -> None:
    for flags, message in (
        ("--cpus 3 --pp 2", "2 does not divide 3 workers; use 1, 3"),
        ("--cpus 2 --pp 2 --strategy deepspeed", "strategy deepspeed does not compute in stages; use auto, ddp, fsdp"),
    ):
        output = run(kernel, "1", flags)
        assert output.error is not None
        assert message in output.error[1]
