# Parametrizations that a cell adds to a model that it has trained; one is a norm over the rows, which are divided.
# outcome: told model is a new object
# compare: model, losses, kind
# %%
import torch
import torch.nn as nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(40, 5), torch.randn(40, 1)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
losses = []


def train():
    for xb, yb in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(xb), yb)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())


# %% accelerate --strategy fsdp
train()
weight_norm(model[0])
weight_norm(model[2], dim=1)
model[4].bias = nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
train()

# %%
kind = str(model)
