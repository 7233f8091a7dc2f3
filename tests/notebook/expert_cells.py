"""A cell that builds a model with experts. The last batch has one row: three of four workers send no tokens."""

from __future__ import annotations

SETUP = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_experts = 4
        self.up = nn.Parameter(torch.randn(4, 8, 12) / 3)
        self.down = nn.Parameter(torch.randn(4, 12, 8) / 3)

    def forward(self, tokens, indices, weights):
        result = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            row, choice = torch.where(indices == expert)
            hidden = F.gelu(tokens[row] @ self.up[expert]) @ self.down[expert]
            result.index_add_(0, row, hidden * weights[row, choice, None])
        return result

class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.router, self.experts = nn.LayerNorm(8), nn.Linear(8, 4), Experts()

    def forward(self, x):
        tokens = self.norm(x).flatten(0, 1)
        weights, indices = self.router(tokens).softmax(-1).topk(2)
        return x + self.experts(tokens, indices, weights).view_as(x)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layers = nn.Embedding(11, 8), nn.Sequential(Mixture(), Mixture())
        self.dropout, self.head = nn.Dropout(0.2), nn.Linear(8, 11)

    def forward(self, x):
        return self.head(self.dropout(self.layers(self.embed(x))))

def build():
    torch.manual_seed(3)
    model = Model().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    x = torch.randint(11, (25, 5))
    return model, optimizer, DataLoader(TensorDataset(x, x.roll(1, 1)), batch_size=8, shuffle=True)

def difference():
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return max((ours - theirs).abs().max().item() for ours, theirs in pairs)
"""
