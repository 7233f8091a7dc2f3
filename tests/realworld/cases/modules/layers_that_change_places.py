# Layers that change places in the notebook and in a cell, a forward that the notebook replaces, and a shared weight.
# outcome: equal
# compare: weights, named, model(x).tolist()
# %%
import types

import torch

torch.manual_seed(0)
layers = [torch.nn.Linear(3, 3) for _ in range(3)]
model = torch.nn.Sequential(*layers).double()
other = torch.nn.Linear(3, 3).double()
first = layers[0]
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
x = torch.randn(8, 3).double()


def loss_of(model):
    return (model(x) - 1).pow(2).mean()


# %% accelerate
for _ in range(3):
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()

# %%
model[0], model[2] = model[2], model[0]
first.forward = types.MethodType(lambda self, x: torch.nn.Linear.forward(self, x).tanh(), first)

# %% accelerate
for _ in range(3):
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()

# %% accelerate
model[0], model[1] = model[1], model[0]
for _ in range(3):
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()

# %% accelerate
other.weight = model[0].weight

# %%
for _ in range(3):
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()
weights = [parameter.tolist() for parameter in model.parameters()]
named = [first.weight.tolist(), other.weight is model[0].weight, layers[1] is model[0], layers[0] is model[2]]
