# Weights are exchanged by parameter.data; a state dict, a detached weight and a row that were read before keep the old.
# outcome: equal
# compare: model, losses, before, detached, row
# runs: always
# %%
import torch
from torch import nn

inputs = torch.randn(24, 5)
targets = inputs.sum(1, keepdim=True).sin()
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
averages = {name: value.data.clone() for name, value in model.named_parameters()}
losses = []

# %% accelerate --strategy fsdp
for epoch in range(3):
    for x, y in zip(inputs.split(8), targets.split(8)):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        for name, value in model.named_parameters():
            averages[name] = 0.5 * value.data + 0.5 * averages[name]
    backup = model.state_dict()
    detached = model[0].weight.detach()
    row = model[0].bias.detach()[2:5]
    for name, value in model.named_parameters():
        value.data = averages[name].clone()
    with torch.no_grad():
        losses.append(nn.functional.mse_loss(model(inputs), targets).item())
    before = {name: value.clone() for name, value in backup.items()}
    model.load_state_dict(backup)
    with torch.no_grad():
        losses.append(nn.functional.mse_loss(model(inputs), targets).item())
