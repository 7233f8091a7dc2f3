# After an evaluation the code reads layers' weights, keeps and writes them, freezes a layer and looks up its state.
# outcome: equal
# compare: model, losses, norms, found, row, kept, first
# runs: always
# %%
import copy

import torch
from torch import nn

inputs = torch.randn(24, 5)
targets = inputs.sum(1, keepdim=True).sin()
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
losses, norms, found = [], [], []

# %% accelerate --strategy fsdp
for epoch in range(4):
    for x, y in zip(inputs.split(8), targets.split(8)):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        losses.append(nn.functional.mse_loss(model(inputs), targets).item())
    found.append((model[0].weight in optimizer.state, model[2].weight.grad is None))
    norms.append(optimizer.state[model[0].weight]["exp_avg"].norm().item())
    norms.append(nn.utils.clip_grad_norm_(model[2].parameters(), 0.1).item())
    model[2].weight.data.mul_(0.9)
    nn.init.zeros_(model[4].bias)
    row, kept = model[0].weight.detach()[1], model[0].weight
    first = first if epoch else copy.deepcopy(model[0])
    if epoch == 1:
        model[0].requires_grad_(False)
    if epoch == 2:
        model[0].load_state_dict(first.state_dict())
found.append(kept is model[0].weight)
