# An optimizer's state dict shows later steps, wherever they are taken, until the state is loaded; a deep copy does not.
# outcome: equal
# compare: model, live, copied, moments, weights, momentum, copy.deepcopy(opt.state_dict())
# %%
import copy

import torch
from torch import nn, optim

torch.manual_seed(0)
inputs, targets = torch.randn(12, 4), torch.randn(12, 1)
model = nn.Linear(4, 1)
opt = optim.Adam(model.parameters(), lr=0.1)


def train():
    loss = ((model(inputs) - targets) ** 2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()


# %% accelerate
train()
live = opt.state_dict()
copied = copy.deepcopy(live)
weights = model.state_dict()
# %%
train()
# %% accelerate
moments = {number: state["exp_avg"].clone() for number, state in live["state"].items()}
train()
# %%
live["state"][0]["exp_avg"].zero_()
train()
# %% accelerate
live["state"][0]["exp_avg"].add_(1)
momentum = opt.state[model.weight]["exp_avg_sq"]
train()
# %%
momentum.mul_(2)
train()
# %% accelerate
opt.load_state_dict(copy.deepcopy(copied))
train()
