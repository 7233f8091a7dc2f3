"""Cells whose sequences several workers compute together: the notebook's model is whole, and trained as alone."""

from __future__ import annotations

import pytest

from tests.notebook.cells import done, run
from tests.notebook.mesh_cells import SETUP, TRAIN


@pytest.mark.nightly
def test_a_plain_cell_trains_as_on_one_process_with_dropout_also_after_a_worker_was_killed(kernel) -> None:
    assert kernel.run(SETUP + "model, optimizer, loader = build()\n" + TRAIN + TRAIN).error is None
    kept = "alone, alone_losses, alone_predicted = model, losses, predicted\nmodel, optimizer, loader = build()\n"
    assert kernel.run(kept + "mine, weight = model, model.blocks[0].attention.q.weight").error is None
    flags = "--cpus 4 --cp 2"
    output = done(kernel, TRAIN, flags)
    assert "mesh dp_replicate 2 x cp 2 (rank 3 is dp 1, cp 1)" in output.receipt
    assert "batch 8 = 2 x 4 rows" in output.receipt
    killed = run(kernel, "import os, signal\nif accelerator.process_index == 3:\n    os.kill(os.getpid(), 9)", flags)
    assert killed.error is not None
    assert "rank 3" in killed.error[1]
    done(kernel, TRAIN, f"{flags} --strategy fsdp")
    assert kernel.value("difference()") < 1e-9
    pairs = "(a - b for ours, theirs in zip(losses, alone_losses, strict=True) for a, b in zip(ours, theirs))"
    assert kernel.value(f"max(map(abs, {pairs}))") < 1e-9
    assert kernel.value("(predicted - alone_predicted).abs().max().item()") < 1e-9
    same = kernel.value("(mine is model, weight is model.blocks[0].attention.q.weight, type(weight) is nn.Parameter)")
    assert same == (True, True, True)
    assert kernel.value("model.head.weight is model.embed.weight")


def test_what_does_not_fit_is_refused(kernel) -> None:
    for flags, message in (
        ("--cpus 3 --cp 2", "2 does not divide 3 workers; use 1, 3"),
        ("--cpus 2 --cp 2 --strategy deepspeed", "strategy deepspeed does not divide sequences; use auto, ddp, fsdp"),
        ("--cpus 4 --cp 2 --pp 2", "sequence and pipeline parallelism cannot be combined"),
    ):
        output = run(kernel, "1", flags)
        assert output.error is not None
        assert message in output.error[1]


OTHERS = """
import torch
from torch import nn
from torch.nn import functional as F

class Averaging(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        scores = (x @ x.transpose(-2, -1)).softmax(-1)
        return self.layer(scores @ x)

class Block(nn.Module):
    def __init__(self, draws):
        super().__init__()
        self.averaging, self.mlp, self.draws = Averaging(), nn.Linear(8, 8), draws

    def forward(self, x):
        x = x + self.averaging(x)
        return x + self.mlp(x).tanh() * (torch.rand_like(x) if self.draws else 1)

def train(draws):
    torch.manual_seed(1)
    model = nn.Sequential(Block(draws), Block(draws)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in torch.utils.data.DataLoader(torch.randn(8, 6, 8).double(), batch_size=4):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [value.detach().clone() for value in model.parameters()]
"""


def test_attention_by_hand_is_computed_whole_and_told_and_other_draws_are_refused(kernel) -> None:
    assert kernel.run(OTHERS + "alone = train(False)").error is None
    output = done(kernel, "weights = train(False)", "--cpus 2 --cp 2")
    assert "with mesh.cp 2, averaging of Block computed whole on each worker" in output.stderr
    assert kernel.value("max((a - b).abs().max().item() for a, b in zip(weights, alone, strict=True))") < 1e-9
    refused = run(kernel, "train(True)", "--cpus 2 --cp 2")
    assert refused.error is not None
    problem = (
        "mesh.cp 2 can divide no block of Sequential (Block: it draws random numbers by other functions than dropout"
    )
    assert problem in refused.error[1]
