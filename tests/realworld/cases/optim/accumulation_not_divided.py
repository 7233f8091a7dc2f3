# Gradient accumulation by hand without a division: gradients add up over three batches.
# outcome: equal
# compare: model
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(50, 4), torch.randn(50, 1)
loader = DataLoader(TensorDataset(x, y), batch_size=7)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.03)

# %% accelerate
for epoch in range(2):
    for i, (xb, yb) in enumerate(loader):
        nn.functional.mse_loss(model(xb), yb).backward()
        if i % 3 == 2:
            optimizer.step()
            model.zero_grad()
