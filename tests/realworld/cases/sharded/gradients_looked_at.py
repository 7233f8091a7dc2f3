# Sharded gradients are read, changed and cleared in cells of the notebook.
# outcome: equal
# compare: model, found, again
# %%
import torch
from torch import nn

x = torch.randn(8, 3)
model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# %% accelerate --strategy fsdp
for _ in range(3):
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    optimizer.step()

# %%
found = [p.grad.norm().item() for p in model.parameters()]
for p in model.parameters():
    p.grad *= 2

# %% accelerate --strategy fsdp
again = [p.grad.norm().item() for p in model.parameters()]
optimizer.step()

# %%
optimizer.zero_grad()

# %% accelerate --strategy fsdp
model(x).mean().backward()
optimizer.step()
