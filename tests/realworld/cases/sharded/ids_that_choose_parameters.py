# Ids of parameters of earlier cells choose what a divided model trains, and a cell adds one.
# outcome: equal
# compare: model, factors, found
# %%
from collections import OrderedDict

import torch
from torch import nn

inputs = torch.randn(32, 5)
targets = inputs.sum(1, keepdim=True).sin()
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
factors_of = {id(value): 0.1 for value in model[0].parameters()}
frozen = {id(model[0].bias)}
orders = [
    OrderedDict((key(value), place) for place, value in enumerate(model.parameters())) for key in (id, lambda x: x)
]
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
found = []

# %% accelerate --strategy fsdp
for x, y in zip(inputs.split(8), targets.split(8)):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    for value in model.parameters():
        value.grad.mul_(0.0 if id(value) in frozen else factors_of.get(id(value), 1.0))
    optimizer.step()
factors_of[id(model[2].bias)] = 0.5
found.append([[*order.values()] for order in orders])
found.append([id(value) in frozen for value in model.parameters()])

# %%
factors = [factors_of.get(id(value)) for value in model.parameters()]
found.append([id(value) in frozen for value in model.parameters()])
found += [[order[key(value)] for value in model.parameters()] for order, key in zip(orders, (id, lambda x: x))]
