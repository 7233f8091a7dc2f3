# One minus the Pearson correlation of predictions and targets in the batch.
# outcome: equal
# compare: model
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

x = torch.randn(48, 4)
y = x.sum(1) + torch.randn(48)
loader = DataLoader(TensorDataset(x, y), batch_size=12)
model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)


def pearson_loss(pred, target):
    vx, vy = pred - pred.mean(), target - target.mean()
    return 1 - (vx * vy).sum() / (torch.sqrt((vx ** 2).sum()) * torch.sqrt((vy ** 2).sum()) + 1e-8)

# %% accelerate
for epoch in range(2):
    for xb, yb in loader:
        loss = pearson_loss(model(xb).squeeze(1), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
