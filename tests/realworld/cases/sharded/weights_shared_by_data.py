# A plain network gets the memory of a sharded one's weights, and weights get that of a vector: each follows the other.
# outcome: equal
# compare: model, target, vector, other, losses
# %%
import torch
from torch import nn

inputs = torch.randn(24, 5)
targets = inputs.sum(1, keepdim=True).sin()


def build():
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))


model, other = build(), build()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
another = torch.optim.SGD(other.parameters(), lr=0.1)
losses = []

# %% accelerate --strategy fsdp
target = build()
for theirs, own in zip(target.parameters(), model.parameters()):
    theirs.data = own.data
vector = nn.utils.parameters_to_vector(other.parameters()).detach() * 0.5
nn.utils.vector_to_parameters(vector, other.parameters())
for epoch in range(3):
    for x, y in zip(inputs.split(8), targets.split(8)):
        optimizer.zero_grad()
        another.zero_grad()
        with torch.no_grad():
            y = y + 0.5 * target(x)
        (nn.functional.mse_loss(model(x), y) + nn.functional.mse_loss(other(x), y)).backward()
        optimizer.step()
        another.step()
    vector.mul_(0.9)
    with torch.no_grad():
        losses.append(nn.functional.mse_loss(other(inputs), targets).item())
