# What a model saves for its backward pass is counted, and kept in single precision, for some of the steps.
# outcome: equal
# compare: sizes, model, losses
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks

x, y = torch.randn(32, 5), torch.randint(0, 2, (32,))
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sizes, losses = [], []


def pack(tensor):
    sizes.append(tensor.numel())
    return tensor.float() if tensor.is_floating_point() else tensor


def unpack(tensor):
    return tensor.double() if tensor.is_floating_point() else tensor


def step():
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())


# %% accelerate
step()
with saved_tensors_hooks(pack, unpack):
    step()
step()
