# Configs whose classes read attributes as items, and raise KeyError for a name that they lack.
# outcome: equal
# compare: config, options, weights
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F


class AttrDict(dict):
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


class Options:
    def __init__(self, **values):
        self.values = values

    def __getattr__(self, name):
        return self.values[name]


model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(32, 4), torch.randint(0, 2, (32,))
config = AttrDict(epochs=2, nested=AttrDict(lr=0.1), losses=[])
options_object = Options(scale=2.0, losses=[])

# %% accelerate
for epoch in range(config.epochs):
    optimizer.zero_grad()
    loss = options_object.scale * F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    config.last = loss.item()
    config.losses.append(loss.item())
    options_object.losses.append(loss.item())

# %%
config.nested.lr = 0.05

# %% accelerate
for group in optimizer.param_groups:
    group["lr"] = config.nested.lr
optimizer.zero_grad()
loss = F.cross_entropy(model(x), y)
loss.backward()
optimizer.step()
config.final = loss.item()
options, weights = dict(options_object.values), model.weight.detach().clone()
