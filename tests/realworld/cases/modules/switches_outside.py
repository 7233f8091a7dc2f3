# Models that centre their features by batch in the last epoch, switched by values outside of them.
# outcome: equal
# compare: models, losses
# %%

import argparse
from enum import Enum

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

loader = DataLoader(TensorDataset(torch.randn(80, 6), torch.randint(0, 3, (80,))), batch_size=16, shuffle=True)


class Phase(Enum):
    WARM_UP = 1
    MAIN = 2


config = {"lr": 0.1}
tricks = []
args = argparse.Namespace(phase=Phase.WARM_UP)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 16)
        self.head = nn.Linear(16, 3)
        self.register_buffer("strength", torch.zeros(()))

    def forward(self, x):
        h = torch.relu(self.body(x))
        return self.head(h - self.strength * h.mean(0, keepdim=True))


class ByKey(Net):
    def forward(self, x):
        h = torch.relu(self.body(x))
        return self.head(h - h.mean(0, keepdim=True) if config.get("center", False) else h)


class ByItem(Net):
    def forward(self, x):
        h = torch.relu(self.body(x))
        return self.head(h - h.mean(0, keepdim=True) if "center" in tricks else h)


class ByPhase(Net):
    def forward(self, x):
        h = torch.relu(self.body(x))
        return self.head(h - h.mean(0, keepdim=True) if args.phase is Phase.MAIN else h)


models = nn.ModuleList([Net(), ByKey(), ByItem(), ByPhase()])
optimizers = [torch.optim.SGD(model.parameters(), lr=config["lr"]) for model in models]

# %% accelerate
losses = []
for epoch in range(3):
    if epoch == 2:
        models[0].strength.fill_(0.5)
        config["center"] = True
        tricks.append("center")
        args.phase = Phase.MAIN
    for x, y in loader:
        for model, optimizer in zip(models, optimizers):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
