# Hooks of an optimizer, registered in the cell that trains, beside some of the notebook; a later cell removes one.
# outcome: equal
# compare: weights, before, after, later, saves, model
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F

model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
x, y = torch.randn(32, 4), torch.randint(0, 2, (32,))
before, after, later, saves = [], [], [], []


def train():
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


optimizer.register_step_post_hook(lambda *_: after.append(len(after)))
optimizer.register_state_dict_post_hook(lambda *_: saves.append(len(saves)))

# %% accelerate
handle = optimizer.register_step_post_hook(lambda *_: later.append(model.weight.sum().item()))
optimizer.register_step_pre_hook(lambda *_: before.append(model.weight.grad.norm().item()))
for step in range(3):
    train()
saved = optimizer.state_dict()

# %%
train()
handle.remove()
train()
optimizer.register_step_post_hook(lambda *_: later.append(-1.0))

# %% accelerate
for step in range(2):
    train()

# %%
train()
weights = model.weight.detach().clone()
