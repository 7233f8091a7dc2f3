# A library of training loops counts samples over ranks where torch.distributed is in use, and steps through its engine.
# outcome: equal
# compare: counts, model
# %%

import importlib
import sys
from pathlib import Path

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

# The name is that of a real package, which accel_nb knows.
Path("site-packages").mkdir()
Path("site-packages/ignite.py").write_text("""
import torch
import torch.distributed as dist


class Engine:
    def __init__(self, step):
        self.step, self.seen = step, torch.zeros(())

    def run(self, loader):
        self.seen.zero_()
        for batch in loader:
            self.step(batch)
            self.seen += len(batch[0])
        total = self.seen.clone()
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(total)
        return total.item()
""")
sys.path.insert(0, "site-packages")
sys.modules.pop("ignite", None)
importlib.invalidate_caches()
from ignite import Engine

data = TensorDataset(torch.randn(22, 4), torch.randn(22, 1))
training, held_out = DataLoader(data, batch_size=6, shuffle=True), DataLoader(data, batch_size=11)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)


def train(batch):
    x, y = batch
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()


@torch.no_grad()
def evaluate(batch):
    model(batch[0])


# %% accelerate
counts = [Engine(step).run(loader) for step, loader in ((train, training), (evaluate, held_out), (train, training))]
