# A state dict that is kept without a copy is that of the present weights: loading it changes nothing; a copy is loaded.
# outcome: equal
# compare: model, other, losses
# %%
import copy

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

loader = DataLoader(TensorDataset(torch.randn(40, 5), torch.randn(40, 1)), batch_size=8)
model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
other = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
optimizer = torch.optim.Adam([*model.parameters(), *other.parameters()], lr=0.05)
losses = []

# %% accelerate --strategy fsdp
best, kept, copied = float("inf"), None, None
for epoch in range(3):
    for xb, yb in loader:
        loss = nn.functional.mse_loss(model(xb), yb) + nn.functional.mse_loss(other(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    losses.append(loss.item())
    if epoch == 0:
        kept, copied = model.state_dict(), copy.deepcopy(other.state_dict())
model.load_state_dict(kept)
other.load_state_dict(copied)
del kept
