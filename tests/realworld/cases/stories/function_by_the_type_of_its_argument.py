# A function of functools.singledispatch of an earlier cell, with an implementation that the cell adds, and a weak cache.
# outcome: equal
# compare: sizes, more, count, cached, afterwards
# %%
from functools import singledispatch
from weakref import WeakKeyDictionary
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(34, 6), torch.randint(0, 3, (34,))
loader = DataLoader(TensorDataset(x, y), batch_size=10, shuffle=True)
model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


class Run:
    pass


@singledispatch
def size(value):
    return 1


@size.register
def _(value: list):
    return sum(map(size, value))


@size.register(torch.Tensor)
def _(value):
    return value.numel()


@size.register
def _(value: Run):
    return steps[value]


run, steps = Run(), WeakKeyDictionary()
steps[run] = 0

# %% accelerate
sizes = []
for xb, yb in loader:
    loss = F.cross_entropy(model(xb), yb)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    steps[run] += 1
    sizes.append(size([xb, yb, 0, run]))


@size.register
def _(value: dict):
    return 100


more = size([{}, 0, run])
count = len(size.registry)

# %%
cached = steps[run]
afterwards = size([{}, x, run]), len(size.registry)
del size, steps, run
