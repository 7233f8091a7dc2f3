# The step of an optimizer that has a schedule, replaced in the notebook; a cell replaces that of another, and attributes.
# outcome: equal
# compare: weights, rates, steps, tags, model, head
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F

model, head = nn.Linear(4, 8), nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
other = torch.optim.Adam(head.parameters(), lr=0.05)
x, y = torch.randn(32, 4), torch.randint(0, 2, (32,))
rates, steps = [], 0


def counted(step):
    def step_and_count(*args, **kwargs):
        global steps
        steps += 1
        return step(*args, **kwargs)

    return step_and_count


def train():
    optimizer.zero_grad()
    other.zero_grad()
    F.cross_entropy(head(torch.tanh(model(x))), y).backward()
    optimizer.step()
    other.step()


optimizer.step = counted(optimizer.step)
optimizer.tag, other.passes = "model", 0

# %% accelerate
for step in range(3):
    train()
    scheduler.step()
    rates.append(scheduler.get_last_lr()[0])
    other.passes += 1
other.step = counted(other.step)
scheduler.tag = "steps"
train()

# %%
train()
optimizer.tag = "both"

# %% accelerate
train()
other.passes += 1
tags = [optimizer.tag, other.passes, scheduler.tag]

# %%
other.passes += 1
train()
tags += [optimizer.tag, other.passes, scheduler.tag]
weights = model.weight.detach().clone()
