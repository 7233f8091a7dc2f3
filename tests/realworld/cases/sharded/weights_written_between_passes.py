# Weights are written between two passes without gradients, as in a random search, and between a pass and its gradients.
# outcome: equal
# compare: model, losses
# %%
import torch
from torch import nn

inputs = torch.randn(24, 5)
targets = inputs.sum(1, keepdim=True).sin()
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []

# %% accelerate --strategy fsdp
weights = list(model.parameters())
torch.manual_seed(1)
for step in range(4):
    noise = [0.1 * torch.randn(value.shape) for value in weights]
    with torch.no_grad():
        before = nn.functional.mse_loss(model(inputs), targets).item()
        for value, change in zip(weights, noise):
            value.data.add_(change)
        losses.append(nn.functional.mse_loss(model(inputs), targets).item())
        if losses[-1] > before:
            for value, change in zip(weights, noise):
                value.data.sub_(change)
    output = model(inputs)
    penalty = 0.01 * model[0].weight.abs().sum() + 0.01 * model[2].weight.norm()
    optimizer.zero_grad()
    (nn.functional.mse_loss(output, targets) + penalty).backward()
    with torch.no_grad():
        losses.append(model(inputs).mean().item())
    optimizer.step()
    with torch.no_grad():
        losses.append(model(inputs).mean().item())
