# A cell replaces a weight by another parameter after an evaluation, and trains on with a new optimizer.
# outcome: equal
# compare: model, losses
# %%
import torch
from torch import nn

x, y = torch.randn(24, 5), torch.randn(24, 2)
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []


def train():
    for _ in range(2):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())


# %% accelerate --strategy fsdp
train()
with torch.no_grad():
    losses.append(nn.functional.mse_loss(model(x), y).item())
model[2].weight = nn.Parameter(model[2].weight.detach() * 0.5)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train()
