"""Cells that train a model whose layers are divided among workers."""

from __future__ import annotations

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
