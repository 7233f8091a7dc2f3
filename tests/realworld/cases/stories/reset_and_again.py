# %reset -f between two trainings with the same names.
# outcome: equal
# compare: model
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
x, y = torch.randn(24, 3), torch.randn(24, 1)
loader = DataLoader(TensorDataset(x, y), batch_size=8)
model = nn.Sequential(nn.Linear(3, 6), nn.LayerNorm(6), nn.Linear(6, 1)).eval()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# %% accelerate
for xb, yb in loader:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(xb), yb).backward()
    optimizer.step()

# %%
%reset -f
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(2)
x, y = torch.randn(24, 4), torch.randn(24, 1)
loader = DataLoader(TensorDataset(x, y), batch_size=8)
model = nn.Linear(4, 1)

# %% accelerate
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for xb, yb in loader:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(xb), yb).backward()
    optimizer.step()
