# Gradients are deleted, or set to zeros by the model, after every step.
# outcome: equal
# needs: deepspeed
# compare: model, seen
# %%
import torch
from torch import nn

torch.set_default_dtype(torch.float32)
inputs = torch.randn(32, 5)
targets = inputs.sum(1, keepdim=True).sin()
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
seen = []

# %% accelerate --strategy deepspeed
for number, (x, y) in enumerate(zip(inputs.split(8), targets.split(8))):
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    if number % 2:
        for value in model.parameters():
            del value.grad
        seen.append([value.grad is None for value in model.parameters()])
    else:
        model.zero_grad(set_to_none=False)
        seen.append([float(value.grad.abs().sum()) for value in model.parameters()])
