# Averages that are assigned to the weights for an evaluation, and are all kept.
# outcome: equal
# compare: model, losses, kept

# %%
import torch
from torch import nn

model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
averages = {name: value.detach().clone() for name, value in model.named_parameters()}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(48, 6), torch.randn(48, 1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)
losses, kept = [], []

# %% accelerate --strategy fsdp
for epoch in range(4):
    for inputs, targets in loader:
        optimizer.zero_grad()
        ((model(inputs) - targets) ** 2).mean().backward()
        optimizer.step()
        for name, value in model.named_parameters():
            averages[name] = averages[name] * 0.9 + value.data * 0.1
    trained = {name: value.data for name, value in model.named_parameters()}
    for name, value in model.named_parameters():
        kept.append(averages[name].clone())
        value.data = kept[-1]
    losses.append(float(((model(x) - y) ** 2).mean().detach()))
    for name, value in model.named_parameters():
        value.data = trained[name]
    losses.append(float(((model(x) - y) ** 2).mean().detach()))
