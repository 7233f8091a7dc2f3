# Cells of the notebook look at the gradients that a loop has left, clip them and clear them.
# outcome: equal
# compare: model, norms, total, fresh.weight.grad, first, left
# %%
import torch
from torch import nn

x, y = torch.randn(12, 3), torch.randn(12, 1)
model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
before = model[0].weight.grad

# %% accelerate
for _ in range(3):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
fresh = nn.Linear(3, 1)
fresh(x).mean().backward()

# %%
norms = [p.grad.norm().item() for p in model.parameters()]
total = nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()
first = model[0].weight.grad.clone()

# %% accelerate
optimizer.step()  # with the clipped gradients
nn.functional.mse_loss(model(x), y).backward()

# %%
optimizer.zero_grad()

# %% accelerate
left = [p.grad is None for p in model.parameters()]
nn.functional.mse_loss(model(x), y).backward()
optimizer.step()
