# Weights of a trained model get the memory of another trained one's, and both are trained further.
# outcome: refused assigned to those of another
# compare: losses
# %%
import torch
from torch import nn

inputs = torch.randn(24, 5)
targets = inputs.sum(1, keepdim=True).sin()
model, other = nn.Linear(5, 1), nn.Linear(5, 1)
optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
losses = []

# %% accelerate --strategy fsdp
for x, y in zip(inputs.split(8), targets.split(8)):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y) + nn.functional.mse_loss(other(x), -y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    for value, theirs in zip(model.parameters(), other.parameters()):
        value.data = theirs.data
