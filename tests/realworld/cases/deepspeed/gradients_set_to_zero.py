# Gradients are set to zero and not to None, by the optimizer: they exist, and steps with them go on with momentum.
# outcome: equal
# needs: deepspeed
# compare: model, seen, left
# %%
import torch
from torch import nn

torch.set_default_dtype(torch.float32)
x, y = torch.randn(32, 5), torch.randn(32, 1)
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
seen = []

# %% accelerate --strategy deepspeed --zero-stage 1
optimizer.zero_grad(set_to_none=False)
optimizer.step()
for part in x.split(8):
    nn.functional.mse_loss(model(part), part.sum(1, keepdim=True)).backward()
    optimizer.step()
    optimizer.zero_grad(False)
    seen.append([float(value.grad.abs().sum()) for value in model.parameters()])
    optimizer.step()

# %%
left = [p.grad for p in model.parameters()]

# %% accelerate --strategy deepspeed --zero-stage 3
nn.functional.mse_loss(model(x), y).backward()
optimizer.zero_grad(set_to_none=False)
nn.functional.mse_loss(model(x), y).backward()
optimizer.step()
optimizer.zero_grad(set_to_none=False)
optimizer.step()
