# A forward pass that counts in a collections.Counter, whose `update` adds.
# outcome: equal
# compare: model, model.calls
# %%
from collections import Counter

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.calls = Counter()

    def forward(self, x):
        self.calls["positive"] += int((x[:, 0] > 0).sum())
        self.calls["calls"] += 1
        return self.layer(x)


model = Counting()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(40, 4)), batch_size=8)

# %% accelerate
for epoch in range(2):
    for (x,) in loader:
        loss = model(x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
