# Copies of the states of a divided model and its optimizer are edited in the notebook and loaded in a later cell.
# outcome: equal
# compare: model, losses, optimizer.state_dict()

# %%
import copy

import torch
from torch import nn

inputs = torch.randn(40, 5)
targets = inputs.sum(1, keepdim=True).sin()
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
losses = []


def train():
    for x, y in zip(inputs.split(8), targets.split(8)):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())


# %% accelerate --strategy fsdp
train()
weights = copy.deepcopy(model.state_dict())
states = copy.deepcopy(optimizer.state_dict())
train()

# %%
weights["0.weight"].mul_(0.5)
for state in states["state"].values():
    state["exp_avg"] *= 0.5

# %% accelerate --strategy fsdp
model.load_state_dict(weights)
optimizer.load_state_dict(states)
train()
