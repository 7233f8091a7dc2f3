# Only labelled samples count: a masked sum over clamp(min=1) of their number.
# outcome: equal
# compare: model
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(48, 4), torch.randn(48, 1)
has_label = (torch.rand(48, 1) < 0.15).double()
loader = DataLoader(TensorDataset(x, y, has_label), batch_size=8)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# %% accelerate
for epoch in range(2):
    for xb, yb, mask in loader:
        error = (model(xb) - yb) ** 2
        loss = (error * mask).sum() / mask.sum().clamp(min=1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
