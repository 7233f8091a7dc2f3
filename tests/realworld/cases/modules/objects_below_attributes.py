# A list that a model reaches only through an object in its attribute; attributes are bound to other known objects.
# outcome: equal
# compare: losses, model.record.losses is losses, table, model.layer.table is table, first.steps, second.steps, model.record is second, offset, model.deep["offset"] is offset, settings.names, model.settings is settings, counts.tolist(), model.counts is counts
# %%
from array import array
from types import SimpleNamespace

import torch
from torch import nn


class Record:
    def __init__(self, losses):
        self.losses = losses
        self.steps = 0


class Net(nn.Module):
    def __init__(self, record, settings, counts):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.record = record
        self.settings = settings
        self.counts = counts

    def forward(self, x):
        return self.layer(x)


losses, table, offset = [], {"rows": []}, torch.zeros(3)
first, second = Record(losses), Record(losses)
settings, counts = SimpleNamespace(names=["start"]), array("d", [0.0] * 3)
torch.manual_seed(0)
model = Net(first, settings, counts)
model.layer.table = table
model.deep = {"offset": offset}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(8, 4), torch.randn(8, 2)


def train():
    for step in range(3):
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        model.record.losses.append(loss.item())
        model.record.steps += 1
        model.layer.table["rows"].append(step)
        model.deep["offset"] += loss.item()
        model.settings.names.append(f"step {step}")
        model.counts[step] += loss.item()


# %% accelerate
train()
# %%
losses.append(100.0)
table["more"] = 1
offset[0] = 7
settings.names.append("between")
model.record = second
# %% accelerate
train()
model.record.steps += 10
# %%
counts[1] = 4.0
# %% accelerate
train()
