# The same functional style, with the batches of a loader.
# outcome: equal
# compare: params
# %%
import torch
import torch.nn as nn
from torch.func import functional_call, grad
from torch.utils.data import DataLoader, TensorDataset

x = torch.randn(40, 3)
y = x.sum(1, keepdim=True)
net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
params = {name: p.detach().clone() for name, p in net.named_parameters()}


def loss_fn(params, x, y):
    return ((functional_call(net, params, (x,)) - y) ** 2).mean()

# %% accelerate
for epoch in range(2):
    for xb, yb in loader:
        grads = grad(loss_fn)(params, xb, yb)
        params = {name: p - 0.1 * grads[name] for name, p in params.items()}
