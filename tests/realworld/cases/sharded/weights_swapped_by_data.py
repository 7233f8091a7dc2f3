# Weights and their averages change places by parameter.data, and the weights come back after an evaluation.
# outcome: equal
# compare: model, averages, kept, losses
# %%
import torch
from torch import nn

inputs = torch.randn(24, 5)
targets = inputs.sum(1, keepdim=True).sin()
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
averages = {name: value.data.clone() for name, value in model.named_parameters()}
kept = {}
losses = []

# %% accelerate --strategy fsdp
for epoch in range(3):
    for x, y in zip(inputs.split(8), targets.split(8)):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        for name, value in model.named_parameters():
            averages[name] = 0.5 * value.data + 0.5 * averages[name]
    for name, value in model.named_parameters():
        kept[name] = value.data
        value.data = averages[name]
    with torch.no_grad():
        losses.append(nn.functional.mse_loss(model(inputs), targets).item())
    for name, value in model.named_parameters():
        value.data = kept[name]
    with torch.no_grad():
        losses.append(nn.functional.mse_loss(model(inputs), targets).item())
