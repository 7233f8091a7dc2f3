# State dicts and tensors of an optimizer's state, of either side, show the steps of a divided model and of the notebook.
# outcome: equal
# compare: model, early, late, moment, seen, optimizer.state_dict()
# %%
import torch
from torch import nn

inputs = torch.randn(24, 4)
targets = inputs.sum(1, keepdim=True).sin()
model = nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
seen = []


def train():
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()


train()
early = optimizer.state_dict()

# %% accelerate --strategy fsdp
train()
late = optimizer.state_dict()
seen.append(early["state"][0]["exp_avg"].sum().item())

# %%
train()
early["state"][0]["exp_avg"].mul_(0.5)

# %% accelerate --strategy fsdp
seen.append(late["state"][0]["exp_avg"].sum().item())
train()
moment = optimizer.state[model.weight]["exp_avg_sq"]

# %%
train()
moment.mul_(2)

# %% accelerate --strategy fsdp
seen += [moment.sum().item(), late["state"][0]["exp_avg_sq"].sum().item()]
train()
