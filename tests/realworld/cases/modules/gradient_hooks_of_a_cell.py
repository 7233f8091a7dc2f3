# Gradient hooks that one cell registers, others use, and a last one removes; the notebook has registered one too.
# outcome: equal
# compare: model, norms, calls

# %%
import torch
from torch import nn
from torch.nn import functional as F

inputs, targets = torch.randn(32, 4), torch.randn(32, 1)
model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
norms, calls = [], 0


def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        norms.append(sum(p.grad.norm().item() for p in model.parameters()))
        optimizer.step()


own = model[0].weight.register_hook(lambda gradient: gradient * 0.5)

# %% accelerate
handles = [p.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02)) for p in model.parameters()]


def count(parameter):
    global calls
    calls += 1


last = model[2].bias.register_post_accumulate_grad_hook(count)
train(2)

# %%
train(2)
handles.pop().remove()

# %% accelerate
train(2)
handles.pop().remove()
own.remove()

# %%
train(2)

# %% accelerate
train(1)
for handle in [*handles, last]:
    handle.remove()

# %%
train(2)

# %% accelerate
train(1)
