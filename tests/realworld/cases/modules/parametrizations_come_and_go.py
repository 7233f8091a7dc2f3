# Parametrizations, one of the user's class, that a cell adds to the notebook's model, and that the notebook removes.
# outcome: equal
# compare: model, best, found, losses
# %%
import copy

import torch
import torch.nn as nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(40, 5), torch.randn(40, 1)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).T


model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 1))
parametrize.register_parametrization(model[0], "weight", Symmetric(), unsafe=True)

# %% accelerate
parametrizations.weight_norm(model[2])
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
losses = []
for xb, yb in loader:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(xb), yb)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
best = copy.deepcopy(model)

# %%
found = [isinstance(model[2], nn.Linear), str(model), [*model.state_dict()]]
parametrize.remove_parametrizations(model[2], "weight")
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

# %% accelerate
for xb, yb in loader:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(xb), yb).backward()
    optimizer.step()
