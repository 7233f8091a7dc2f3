# Pinn only derivative.
# outcome: equal
# compare: norms
# %%

import torch
import torch.nn as nn
import torch.optim as optim

t = torch.linspace(0, 1, 40).view(-1, 1).requires_grad_(True)
model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = optim.Adam(model.parameters(), lr=1e-2)
norms = []

# %% accelerate
for it in range(10):
    optimizer.zero_grad()
    u = model(t)
    du = torch.autograd.grad(u, t, torch.ones_like(u), create_graph=True)[0]
    loss = ((du - torch.cos(t)) ** 2).mean()
    loss.backward()
    norms.append(sum((p.grad**2).sum().item() for p in model.parameters() if p.grad is not None) ** 0.5)
    for p in model.parameters():
        if p.grad is not None:
            p.grad.clamp_(-0.01, 0.01)
    optimizer.step()
print(round(loss.item(), 6), round(norms[-1], 6))
