# Weights that are changed by way of `data` and by load_state_dict between steps, over several cells.
# outcome: equal
# needs: deepspeed
# compare: net, opt
# %%
import copy

import torch
import torch.nn as nn
torch.set_default_dtype(torch.float32)
x = torch.randn(12, 3)
net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
opt = torch.optim.Adam(net.parameters(), lr=0.05)
# %% accelerate --strategy deepspeed
for i in range(6):
    opt.zero_grad()
    loss = (net(x) ** 2).mean()
    loss.backward()
    if i == 2: net[0].weight.data.mul_(0.9)
    opt.step()
    if i == 1: net[0].weight.data.clamp_(-0.3, 0.3)
    if i == 3: net[0].weight.data = net[0].weight.data * 2
    if i == 4:
        with torch.no_grad(): net[2].bias.add_(1)
    if i == 5: net.load_state_dict({k: v * 1.1 for k, v in net.state_dict().items()})
# %% accelerate --strategy deepspeed
for i in range(3):
    opt.zero_grad()
    loss = (net(x) ** 2).mean()
    loss.backward()
    opt.step()
# %%
for i in range(3):
    opt.zero_grad()
    loss = (net(x) ** 2).mean()
    loss.backward()
    opt.step()
# %% accelerate --strategy deepspeed
for i in range(3):
    opt.zero_grad()
    loss = (net(x) ** 2).mean()
    loss.backward()
    opt.step()
