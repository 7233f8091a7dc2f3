# A cell ends after a backward pass; the notebook looks at the gradients, and a later cell adds to them and steps.
# outcome: equal
# needs: deepspeed
# runs: always
# compare: model, first, second
# %%
import torch
from torch import nn

torch.set_default_dtype(torch.float32)
x, y = torch.randn(12, 3), torch.randn(12, 1)
model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

# %% accelerate --strategy deepspeed
nn.functional.mse_loss(model(x), y).backward()

# %%
first = [p.grad.clone() for p in model.parameters()]

# %% accelerate --strategy deepspeed
nn.functional.mse_loss(model(x), y).backward()

# %%
second = [p.grad.clone() for p in model.parameters()]

# %% accelerate --strategy deepspeed --zero-stage 3
optimizer.step()
