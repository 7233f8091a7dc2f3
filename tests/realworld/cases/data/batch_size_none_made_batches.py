# A loader with batch_size=None over a dataset that makes whole batches by itself.
# outcome: equal
# compare: model
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, IterableDataset


class Batches(IterableDataset):
    def __init__(self, x, y, size):
        self.x, self.y, self.size = x, y, size

    def __iter__(self):
        for i in range(0, len(self.x), self.size):
            yield self.x[i:i + self.size], self.y[i:i + self.size]


x, y = torch.randn(30, 4), torch.randint(0, 2, (30,))
loader = DataLoader(Batches(x, y, 7), batch_size=None)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)

# %% accelerate
for epoch in range(2):
    for xb, yb in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(xb), yb).backward()
        optimizer.step()
