# A codebook of a library, made in the cell, that sums its statistics over ranks where torch.distributed is in use.
# outcome: equal
# compare: losses, model
# %%

import importlib
import sys
from pathlib import Path

import torch
import torch.nn as nn

# The name is that of a real package, which accel_nb knows.
Path("site-packages").mkdir()
Path("site-packages/vector_quantize_pytorch.py").write_text("""
import torch
from torch import distributed, nn


def is_distributed():
    return distributed.is_initialized() and distributed.get_world_size() > 1


class Codebook(nn.Module):
    def __init__(self, size, dim):
        super().__init__()
        self.register_buffer("codes", torch.randn(size, dim))
        self.register_buffer("counts", torch.zeros(size))
        self.all_reduce = distributed.all_reduce if is_distributed() else lambda value: None

    def forward(self, x):
        nearest = torch.cdist(x, self.codes).argmin(1)
        if self.training:
            found = torch.zeros_like(self.counts).index_add(0, nearest, torch.ones(len(x)))
            self.all_reduce(found)
            self.counts.lerp_(found, 0.2)
        quantized = self.codes[nearest] * (1 + self.counts[nearest, None])
        return x + (quantized - x).detach()
""")
sys.path.insert(0, "site-packages")
sys.modules.pop("vector_quantize_pytorch", None)
importlib.invalidate_caches()
from vector_quantize_pytorch import Codebook

X = torch.randn(48, 6)
losses = []

# %% accelerate
model = nn.Sequential(nn.Linear(6, 3), Codebook(8, 3), nn.Linear(3, 6))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(3):
    for x in X.split(16):
        loss = (model(x) - x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
