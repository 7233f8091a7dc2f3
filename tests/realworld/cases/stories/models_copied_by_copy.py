# `copy.copy` of a model has the model's layers, which later cells replace and train in both.
# outcome: equal
# compare: shared, best, weight

# %%
import copy

import torch
from torch import nn

x = torch.ones(4, 2)
model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
shared = []

# %% accelerate
alias = copy.copy(model)

# %%
shared.append(alias._modules is model._modules)
model[1] = nn.Linear(3, 2)
best = copy.copy(model)

# %% accelerate
model.append(nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()

# %%
shared += [len(alias), len(best), alias[2] is best[2] is model[2]]
weight = alias[2].weight.detach().clone()
