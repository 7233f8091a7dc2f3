# Copies of the states of a sharded model and of its optimizer, kept in a history in an object, and loaded afterwards.
# outcome: equal
# compare: model, losses, history
# %%
import copy

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class Run:
    def __init__(self):
        self.history = []


x, y = torch.randn(40, 5), torch.randn(40, 1)
loader = DataLoader(TensorDataset(x, y), batch_size=8)
model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
run, losses = Run(), []

# %% accelerate --strategy fsdp
for epoch in range(3):
    for xb, yb in loader:
        loss = nn.functional.mse_loss(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    losses.append(loss.item())
    run.history.append({"epoch": epoch, "states": copy.deepcopy([model.state_dict(), optimizer.state_dict()])})

# %%
history = [entry["states"][1]["state"] for entry in run.history]
weights, steps = run.history[1]["states"]
model.load_state_dict(weights)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
optimizer.load_state_dict(copy.deepcopy(steps))

# %% accelerate --strategy fsdp
for xb, yb in loader:
    loss = nn.functional.mse_loss(model(xb), yb)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
losses.append(loss.item())
