# A parametrised model of an earlier cell, whose class torch makes and refuses to pickle.
# outcome: equal
# compare: model
# %%
import torch
import torch.nn as nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(40, 5), torch.randn(40, 1)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model = nn.Sequential(spectral_norm(nn.Linear(5, 8)), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

# %% accelerate
for xb, yb in loader:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(xb), yb).backward()
    optimizer.step()
