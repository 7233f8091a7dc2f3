# Hooks on gradients of parameters, made by functools.partial.
# outcome: equal
# compare: model, losses, loss
# %%

from functools import partial

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(128, 4)
Y = X.sum(1, keepdim=True)
loader = DataLoader(TensorDataset(X, Y), batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = optim.SGD(model.parameters(), lr=1e-2)
criterion = nn.MSELoss()
for p in model.parameters():
    p.register_hook(partial(torch.clamp, min=-0.05, max=0.05))

# %% accelerate
losses = []
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(epoch, round(losses[-1], 4))
