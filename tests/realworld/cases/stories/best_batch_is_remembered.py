# The loop remembers the batch with the lowest printed loss and stops the epoch early by a running mean.
# outcome: equal
# compare: model
# share: lowest
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(40, 3), torch.randn(40, 1)
loader = DataLoader(TensorDataset(x, y), batch_size=8)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

# %% accelerate
lowest = float("inf")
for epoch in range(3):
    for i, (xb, yb) in enumerate(loader):
        loss = nn.functional.mse_loss(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() < lowest:
            lowest = loss.item()
