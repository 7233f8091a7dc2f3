# Activations taken by a forward hook, registered in an earlier cell, and used in the loss.
# outcome: equal
# compare: model
# runs: always
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(42, 5), torch.randint(0, 3, (42,))
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
activations = {}


def get_activation(name):
    def hook(module, inputs, output):
        activations[name] = output
    return hook


model[1].register_forward_hook(get_activation("relu"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# %% accelerate
for epoch in range(2):
    for xb, yb in loader:
        loss = nn.functional.cross_entropy(model(xb), yb) + 0.01 * activations["relu"].abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
