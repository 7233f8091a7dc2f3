"""Cells whose layers are computed by several workers together: the notebook's model is whole, and trained as alone."""

from __future__ import annotations

import pytest

from tests.notebook.cells import done, run
from tests.notebook.mesh_cells import SETUP, TRAIN

FLAGS = "--cpus 4 --tp 2"


@pytest.mark.nightly
def test_a_plain_cell_trains_as_on_one_process_also_after_a_worker_was_killed(kernel) -> None:
    assert kernel.run(SETUP + "model, optimizer, loader = build()\n" + TRAIN + TRAIN).error is None
    kept = "alone, alone_losses, alone_predicted = model, losses, predicted\nmodel, optimizer, loader = build()\n"
    assert kernel.run(kept + "mine, weight = model, model.blocks[0].attention.q.weight").error is None
    output = done(kernel, TRAIN, FLAGS)
    assert "mesh dp_replicate 2 x tp 2 (rank 3 is dp 1, tp 1), 12 of 13 linear layers divided" in output.receipt
    assert "batch 8 = 2 x 4 rows" in output.receipt
    killed = run(kernel, "import os, signal\nif accelerator.process_index == 3:\n    os.kill(os.getpid(), 9)", FLAGS)
    assert killed.error is not None
    assert "rank 3" in killed.error[1]
    done(kernel, TRAIN, f"{FLAGS} --strategy fsdp")
    assert kernel.value("difference()") < 1e-9
    pairs = "(a - b for ours, theirs in zip(losses, alone_losses, strict=True) for a, b in zip(ours, theirs))"
    assert kernel.value(f"max(map(abs, {pairs}))") < 1e-9
    assert kernel.value("(predicted - alone_predicted).abs().max().item()") < 1e-9
    same = kernel.value("(mine is model, weight is model.blocks[0].attention.q.weight, type(weight) is nn.Parameter)")
    assert same == (True, True, True)
    assert kernel.value("(model.head.weight is model.embed.weight, model.blocks[0].attention.num_heads)") == (True, 4)
    assert kernel.value("[tuple(state['exp_avg'].shape) for state in optimizer.state.values()][:2]") == [(11, 8), (8,)]


def test_what_does_not_fit_is_refused_before_anything_starts(kernel) -> None:
    for flags, message in (
        ("--cpus 3 --tp 2", "2 does not divide 3 workers; use 1, 3"),
        ("--cpus 2 --tp 2 --strategy deepspeed", "strategy deepspeed does not divide layers; use auto, ddp, fsdp"),
    ):
        output = run(kernel, "1", flags)
        assert output.error is not None
        assert message in output.error[1]
