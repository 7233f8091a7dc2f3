# Functional style: parameters in a dict, torch.func.grad of a loss of them, an update that makes new tensors.
# outcome: equal
# compare: params, losses
# %%
import torch
import torch.nn as nn
from torch.func import functional_call, grad_and_value
from torch.utils.data import DataLoader, TensorDataset

x = torch.randn(40, 3)
y = x.prod(1, keepdim=True)
net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
params = {name: p.detach().clone() for name, p in net.named_parameters()}


def loss_fn(params, x, y):
    return ((functional_call(net, params, (x,)) - y) ** 2).mean()

# %% accelerate
losses = []
for step in range(8):
    grads, value = grad_and_value(loss_fn)(params, x, y)
    params = {name: p - 0.1 * grads[name] for name, p in params.items()}
    losses.append(value.item())
