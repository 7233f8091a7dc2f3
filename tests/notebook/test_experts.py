"""Cells whose experts several workers divide: the notebook's model is whole, and trained as alone."""

from __future__ import annotations

import pytest

from tests.notebook.cells import STATE, done, run
from tests.notebook.expert_cells import SETUP
from tests.notebook.mesh_cells import TRAIN


@pytest.mark.nightly
def test_a_plain_cell_trains_as_on_one_process_also_after_a_worker_was_killed(kernel) -> None:
    assert kernel.run(SETUP + "model, optimizer, loader = build()\n" + TRAIN + TRAIN).error is None
    kept = "alone, alone_losses, alone_predicted = model, losses, predicted\nmodel, optimizer, loader = build()\n"
    assert kernel.run(kept + "mine, weight = model, model.layers[0].experts.up").error is None
    flags = "--cpus 4 --ep 2"
    output = done(kernel, TRAIN, flags)
    assert "mesh dp_replicate 4 x ep 2 (rank 3 is dp 3, ep 1)" in output.receipt
    assert "experts 2 of 4 on each worker, in 2 modules" in output.receipt
    loads = kernel.value(f"list({STATE}.curve('busiest expert').columns[-1])")
    assert loads
    assert all(1 <= load <= 4 for load in loads)
    killed = run(kernel, "import os, signal\nif accelerator.process_index == 3:\n    os.kill(os.getpid(), 9)", flags)
    assert killed.error is not None
    assert "rank 3" in killed.error[1]
    done(kernel, TRAIN, "--cpus 4 --ep 4 --strategy fsdp")
    assert kernel.value("difference()") < 1e-9
    pairs = "(a - b for ours, theirs in zip(losses, alone_losses, strict=True) for a, b in zip(ours, theirs))"
    assert kernel.value(f"max(map(abs, {pairs}))") < 1e-9
    assert kernel.value("(predicted - alone_predicted).abs().max().item()") < 1e-9
    same = kernel.value("(mine is model, weight is model.layers[0].experts.up, type(weight) is nn.Parameter)")
    assert same == (True, True, True)


def test_the_plan_prices_divided_experts(kernel) -> None:
    assert kernel.run(SETUP + "model, optimizer, loader = build()").error is None
    plan = kernel.run("%accelerate plan model --data loader --optimizer adamw --cpus 4 --ep 2").stdout
    assert "ddp x ep 2" in plan
    assert "fsdp (3) x ep 2" in plan


def test_what_does_not_fit_is_refused(kernel) -> None:
    for flags, message in (
        ("--cpus 3 --ep 2", "2 does not divide 3 workers; use 1, 3"),
        ("--cpus 2 --ep 2 --strategy deepspeed", "strategy deepspeed does not divide experts; use auto, ddp, fsdp"),
        ("--cpus 4 --ep 2 --pp 2", "expert and pipeline parallelism cannot be combined"),
    ):
        output = run(kernel, "1", flags)
        assert output.error is not None
        assert message in output.error[1]
