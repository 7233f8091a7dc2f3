# Float index sampler.
# outcome: equal
# compare: model, losses
# %%
import random

import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

X = torch.randn(128, 4)
Y = X.sum(1, keepdim=True)
loader = DataLoader(TensorDataset(X, Y), batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
criterion = nn.MSELoss()


class DS(Dataset):
    def __len__(self):
        return 128

    def __getitem__(self, k):
        i, s = k
        return X[i] * s, Y[i]


class Scales(Sampler):
    """multi-scale training: an index with its scale"""

    def __init__(self):
        pass

    def __iter__(self):
        for i in torch.randperm(128).tolist():
            yield i, np.float64(0.5 + 0.5 * random.random())

    def __len__(self):
        return 128


loader = DataLoader(DS(), batch_size=32, sampler=Scales())

# %% accelerate
losses = []
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(epoch, round(losses[-1], 4))
