# Agc.
# outcome: equal
# compare: g
# %%

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

# %% accelerate
# adaptive gradient clipping by hand, two losses in one step, each with its own backward
losses = []
for x, y in loader:
    out = model(x)
    l1 = criterion(out, y)
    l2 = 0.1 * out.pow(2).mean()
    optimizer.zero_grad()
    l1.backward(retain_graph=True)
    l2.backward()
    for p in model.parameters():
        g, w = p.grad.norm(), p.norm().clamp(min=1e-3)
        if g > 0.1 * w:
            p.grad.mul_(0.1 * w / g)
    optimizer.step()
    losses.append(l1.item())
print(losses[-1])
