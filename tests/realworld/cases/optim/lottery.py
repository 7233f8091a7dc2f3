# Lottery.
# outcome: equal
# compare: g
# %%

import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(128, 4)
Y = X.sum(1, keepdim=True)
loader = DataLoader(TensorDataset(X, Y), batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
criterion = nn.MSELoss()

# %% accelerate
masks = {n: (p.abs() > p.abs().median()).double() for n, p in model.named_parameters() if p.dim() > 1}
with torch.no_grad():
    for n, p in model.named_parameters():
        if n in masks:
            p.data = p.data * masks[n]
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        for n, p in model.named_parameters():
            if n in masks:
                g = p.grad.data.numpy()
                p.grad.data = torch.from_numpy(np.where(p.data.numpy() == 0, 0, g))
        optimizer.step()
    print(epoch, loss.item(), sum((p == 0).sum().item() for p in model.parameters()))
