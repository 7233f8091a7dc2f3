# Adaptive sampler.
# outcome: equal
# compare: i, sampler.weights, each, y, x, losses
# %%

import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, Dataset

X = torch.randn(128, 4)
Y = X.sum(1, keepdim=True)


class D(Dataset):
    def __len__(self):
        return 128

    def __getitem__(self, i):
        return X[i], Y[i], i


class HardBatches:
    """draws each batch by the latest losses"""

    def __init__(self, n):
        self.weights = np.ones(128)
        self.n = n

    def __iter__(self):
        for _ in range(self.n):
            yield np.random.choice(128, 16, replace=False, p=self.weights / self.weights.sum()).tolist()


sampler = HardBatches(6)
loader = DataLoader(D(), batch_sampler=sampler)
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = optim.Adam(model.parameters(), lr=1e-2)
losses = []

# %% accelerate
for epoch in range(2):
    for x, y, i in loader:
        optimizer.zero_grad()
        each = ((model(x) - y) ** 2).squeeze(1)
        each.mean().backward()
        optimizer.step()
        sampler.weights[i.numpy()] = each.detach().numpy() + 0.1
        losses.append(each.mean().item())
    print(epoch, losses[-1])
