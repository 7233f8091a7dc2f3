# The notebook reads, clips and clears the gradients that cells leave; the stages of these differ.
# outcome: equal
# needs: deepspeed
# compare: model, fresh, norms, total, left, optimizer
# %%
import torch
from torch import nn

torch.set_default_dtype(torch.float32)
x, y = torch.randn(12, 3), torch.randn(12, 1)
model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
norms, left = [], []


def train(model, optimizer):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()


# %% accelerate --strategy deepspeed --zero-stage 1
train(model, optimizer)

# %%
norms += [p.grad.norm().item() for p in model.parameters()]
total = nn.utils.clip_grad_norm_(model.parameters(), 0.1)

# %% accelerate --strategy deepspeed --zero-stage 1
optimizer.step()  # with the clipped gradients

# %% accelerate --strategy deepspeed --zero-stage 3
nn.functional.mse_loss(model(x), y).backward()  # adds to them
fresh = nn.Linear(3, 1)
train(fresh, torch.optim.SGD(fresh.parameters(), lr=0.1))

# %%
norms += [p.grad.norm().item() for p in (*model.parameters(), *fresh.parameters())]
model[0].weight.grad.zero_()

# %% accelerate --strategy deepspeed --zero-stage 3
optimizer.step()
held = model[2].weight.grad
norms += [held.norm().item()]

# %% accelerate --strategy deepspeed --zero-stage 3
held.mul_(2.0)
optimizer.step()

# %%
norms += [p.grad.norm().item() for p in model.parameters()]
optimizer.zero_grad()

# %% accelerate --strategy deepspeed --zero-stage 2
left += [p.grad is None for p in model.parameters()]
optimizer.step()  # without gradients
for part in (x[:6], x[6:]):
    (model(part) ** 2).mean().backward()
    optimizer.step()

# %%
norms += [p.grad.norm().item() for p in model.parameters()]
for p in model.parameters():
    p.grad = torch.ones_like(p)

# %% accelerate --strategy deepspeed --zero-stage 2
nn.functional.mse_loss(model(x), y).backward()
norms += [p.grad.norm().item() for p in model.parameters()]
optimizer.step()
