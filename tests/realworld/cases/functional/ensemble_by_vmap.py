# An ensemble trained at once: stacked parameters, vmap over functional_call.
# outcome: equal
# compare: params
# %%
import copy
import torch
import torch.nn as nn
from torch.func import functional_call, stack_module_state, vmap

x, y = torch.randn(24, 3), torch.randn(24, 1)
models = [nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)) for _ in range(3)]
params, buffers = stack_module_state(models)
base = copy.deepcopy(models[0]).to("meta")
optimizer = torch.optim.SGD(params.values(), lr=0.1)


def fmodel(params, buffers, x):
    return functional_call(base, (params, buffers), (x,))

# %% accelerate
for step in range(5):
    predictions = vmap(fmodel, in_dims=(0, 0, None))(params, buffers, x)
    loss = ((predictions - y) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
