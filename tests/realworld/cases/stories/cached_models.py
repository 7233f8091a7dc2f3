# Functions with caches: a cell trains the model that one returns and fills another; numbers in a cache are no matter.
# outcome: told table.cache
# compare: total, scaled(3), trained
# %%
import functools

import torch
from torch import nn

x = torch.ones(4, 2)


@functools.cache
def get_model(name):
    return nn.Linear(2, 1)


@functools.lru_cache(maxsize=8)
def table(number):
    return [number]


@functools.lru_cache
def scaled(number):
    return number * 2


get_model("a")

# %% accelerate
table(1).append(5)
total = scaled(2)
model = get_model("b")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

# %%
trained = model.weight.detach() * 0
