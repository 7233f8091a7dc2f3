# The logarithm of the mean error, and a norm of residuals divided by the norm of targets.
# outcome: equal
# compare: model, other
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

x = torch.randn(40, 3)
y = torch.randn(40, 2)
loader = DataLoader(TensorDataset(x, y), batch_size=8)
model, other = nn.Linear(3, 2), nn.Linear(3, 2)
optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.05)

# %% accelerate
for epoch in range(2):
    for xb, yb in loader:
        loss = torch.log(nn.functional.mse_loss(model(xb), yb)) + torch.norm(other(xb) - yb) / torch.norm(yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
