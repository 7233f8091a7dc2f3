# A loader with a generator of its own: an epoch on workers, a plain one, one on workers.
# outcome: equal
# compare: model, order
# runs: always
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

x = torch.randn(40, 3)
y = x.sum(1, keepdim=True)
generator = torch.Generator().manual_seed(5)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True, generator=generator)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
order = []

# %% accelerate
for xb, yb in loader:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(xb), yb).backward()
    optimizer.step()

# %%
for xb, yb in loader:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(xb), yb).backward()
    optimizer.step()
    order.append(xb[0, 0].item())

# %% accelerate
for xb, yb in loader:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(xb), yb).backward()
    optimizer.step()

# %%
order += [xb[0, 0].item() for xb, yb in loader]
