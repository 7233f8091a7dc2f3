# Averages of weights are assigned to the weights at the end, and changed after that in the cell and in the kernel.
# outcome: equal
# compare: model, averages, losses
# %%
import torch
from torch import nn

inputs = torch.randn(24, 5)
targets = inputs.sum(1, keepdim=True).sin()
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []

# %% accelerate --strategy fsdp
averages = {name: value.data.clone() for name, value in model.named_parameters()}
for epoch in range(3):
    for x, y in zip(inputs.split(8), targets.split(8)):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        for name, value in model.named_parameters():
            averages[name].mul_(0.9).add_(value.data, alpha=0.1)
for name, value in model.named_parameters():
    value.data = averages[name]
averages["0.weight"].add_(1)
with torch.no_grad():
    losses.append(nn.functional.mse_loss(model(inputs), targets).item())

# %%
averages["0.bias"].add_(1)
losses.append(model(inputs).mean().item())
