# A robust loss: the median of the absolute errors.
# outcome: equal
# compare: model
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

x = torch.randn(44, 3)
y = x.sum(1, keepdim=True) + torch.randn(44, 1)
loader = DataLoader(TensorDataset(x, y), batch_size=11)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# %% accelerate
for epoch in range(2):
    for xb, yb in loader:
        loss = (model(xb) - yb).abs().median()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
