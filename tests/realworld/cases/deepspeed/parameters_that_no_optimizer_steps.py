# An optimizer steps the last layer only, and no other layer is frozen: their gradients add up, and count in norms.
# outcome: equal
# needs: deepspeed
# compare: model, norms, kept
# %%
import torch
from torch import nn

torch.set_default_dtype(torch.float32)
x, y = torch.randn(24, 3), torch.randn(24, 1)
model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
norms = []


def train():
    nn.functional.mse_loss(model(x), y).backward()
    norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
    optimizer.step()
    optimizer.zero_grad()


# %% accelerate --strategy deepspeed --zero-stage 2
train()
train()
norms += [float(p.grad.norm()) for p in model[0].parameters()]

# %%
norms += [p.grad.norm().item() for p in model[0].parameters()]

# %% accelerate --strategy deepspeed --zero-stage 3
train()
nn.utils.clip_grad_value_(model.parameters(), 0.01)
model[0].bias.grad *= 3
train()
kept = model[0].weight.grad is None

# %%
norms += [p.grad.norm().item() for p in model[0].parameters()]

# %% accelerate --strategy deepspeed --zero-stage 1
train()
model.zero_grad(set_to_none=False)
train()
model[0].weight.grad = torch.ones_like(model[0].weight)
