# Stream random dropout.
# outcome: equal
# compare: y, x, losses, optimizer
# %%

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        for _ in range(self.n):
            x = torch.randn(4)
            yield x, x.sum().view(1)


loader = DataLoader(Stream(128), batch_size=32)
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
optimizer = optim.Adam(model.parameters(), lr=1e-2)
criterion = nn.MSELoss()

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
