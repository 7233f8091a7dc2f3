# Stream random noise.
# outcome: equal
# compare: y, x, losses, optimizer
# %%

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __iter__(self):
        while True:
            x = torch.randn(4)
            yield x, x.sum().view(1)


loader = DataLoader(Stream(), batch_size=32)
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = optim.Adam(model.parameters(), lr=1e-2)
criterion = nn.MSELoss()
losses = []

# %% accelerate
for step, (x, y) in enumerate(loader):
    if step == 8:
        break
    optimizer.zero_grad()
    loss = criterion(model(x + 0.1 * torch.randn_like(x)), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(losses[-1])
