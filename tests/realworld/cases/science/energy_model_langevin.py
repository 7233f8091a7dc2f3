# An energy-based model: negatives made by Langevin steps that start at the data, gradients of the inputs, noise drawn.
# outcome: equal
# compare: energy
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

data = torch.randn(40, 2) * 0.3 + 1
loader = DataLoader(TensorDataset(data), batch_size=8, shuffle=True)
energy = nn.Sequential(nn.Linear(2, 16), nn.SiLU(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(energy.parameters(), lr=1e-2)


def langevin(x, steps=3, step_size=0.1):
    x = x.clone().detach().requires_grad_(True)
    for _ in range(steps):
        grad = torch.autograd.grad(energy(x).sum(), x)[0]
        x = (x - step_size * grad + 0.05 * torch.randn_like(x)).detach().requires_grad_(True)
    return x.detach()

# %% accelerate
for epoch in range(2):
    for (x,) in loader:
        negative = langevin(x)
        e_pos, e_neg = energy(x), energy(negative)
        loss = e_pos.mean() - e_neg.mean() + 0.1 * (e_pos ** 2 + e_neg ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
