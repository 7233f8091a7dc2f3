"""Cells whose layers are computed by several workers together: the notebook's model is whole, and trained as alone."""

from __future__ import annotations

import pytest

from tests.notebook.test_cells import done, run

SETUP = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads = 4
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (part(x).view(batch, length, self.num_heads, -1).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(8), nn.LayerNorm(8)
        self.attention, self.dropout = Attention(), nn.Dropout(0.2)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x):
        x = x + self.dropout(self.attention(self.first(x)))
        return x + self.dropout(self.mlp(self.second(x)))

class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def build():
    torch.manual_seed(3)
    model = Gpt().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    x = torch.randint(11, (30, 5))
    return model, optimizer, DataLoader(TensorDataset(x, x.roll(1, 1)), batch_size=8, shuffle=True)

def difference():
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return max((ours - theirs).abs().max().item() for ours, theirs in pairs)
"""

TRAIN = """
losses = []
model.train()
for x, y in loader:
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    clipped = sum(value.grad.norm().item() ** 2 for value in model.parameters()) ** 0.5
    losses.append((loss.item(), norm.item(), clipped))
model.eval()
with torch.no_grad():
    predicted = model(x)
"""

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
