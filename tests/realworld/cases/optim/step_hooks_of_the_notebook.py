# Hooks of an optimizer's steps, registered in the notebook before and between cells.
# outcome: equal
# compare: weights, norms
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F

model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
x, y = torch.randn(32, 4), torch.randint(0, 2, (32,))
norms = []


def record_norm(optimizer, args, kwargs):
    norms.append(sum(p.grad.norm().item() for p in optimizer.param_groups[0]["params"]))


def clamp_weights(optimizer, args, kwargs):
    for p in optimizer.param_groups[0]["params"]:
        p.data.clamp_(-0.2, 0.2)


handle = optimizer.register_step_pre_hook(record_norm)

# %% accelerate
for step in range(3):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()

# %%
handle.remove()
optimizer.register_step_post_hook(clamp_weights)

# %% accelerate
for step in range(3):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()

# %%
weights = model.weight.detach().clone()
