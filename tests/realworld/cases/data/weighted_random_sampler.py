# An unbalanced set with a WeightedRandomSampler.
# outcome: equal
# compare: model
# %%
import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

x = torch.randn(50, 3)
y = (x[:, 0] > 0.8).long()
counts = np.bincount(y.numpy())
weights = 1.0 / counts[y.numpy()]
sampler = WeightedRandomSampler(weights, num_samples=len(weights), replacement=True)
loader = DataLoader(TensorDataset(x, y), batch_size=8, sampler=sampler)
model = nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# %% accelerate
for epoch in range(2):
    for xb, yb in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(xb), yb).backward()
        optimizer.step()
