# Batch sampler nolen noise.
# outcome: equal
# compare: model, y, x, losses, optimizer
# %%

import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(128, 4)
Y = X.sum(1, keepdim=True)
loader = DataLoader(TensorDataset(X, Y), batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
criterion = nn.MSELoss()


class Buckets:
    def __init__(self, n, b):
        self.n, self.b = n, b

    def __iter__(self):
        for _ in range(4):
            yield np.random.randint(0, self.n, self.b).tolist()


loader = DataLoader(TensorDataset(X, Y), batch_sampler=Buckets(128, 32))

# %% accelerate
losses = []
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x + 0.1 * torch.from_numpy(np.random.randn(*x.shape))), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(epoch, round(losses[-1], 4))
