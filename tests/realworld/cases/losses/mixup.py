# Mixup: samples of the batch mixed with a permutation of them.
# outcome: equal
# compare: model
# %%
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(40, 4), torch.randint(0, 3, (40,))
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)


def mixup_data(x, y, alpha=1.0):
    lam = np.random.beta(alpha, alpha)
    index = torch.randperm(x.size(0))
    return lam * x + (1 - lam) * x[index], y, y[index], lam

# %% accelerate
for epoch in range(2):
    for xb, yb in loader:
        mixed, a, b, lam = mixup_data(xb, yb)
        out = model(mixed)
        loss = lam * F.cross_entropy(out, a) + (1 - lam) * F.cross_entropy(out, b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
