# The penalty at the real samples only (R1), nothing drawn.
# outcome: equal
# compare: D
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

real_data, fake_data = torch.randn(42, 2) + 1, torch.randn(42, 2)
loader = DataLoader(TensorDataset(real_data, fake_data), batch_size=8, shuffle=True)
D = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 1))
optimizer = torch.optim.SGD(D.parameters(), lr=0.05)

# %% accelerate
for epoch in range(2):
    for real, fake in loader:
        real.requires_grad_()
        score = D(real)
        grad, = torch.autograd.grad(score.sum(), real, create_graph=True)
        r1 = grad.pow(2).sum(1).mean()
        loss = F.softplus(-score).mean() + F.softplus(D(fake)).mean() + 5 * r1
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
