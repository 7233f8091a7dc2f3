# Two networks, of which the first backward pass reaches one; parameters are set to None by hand before the second.
# outcome: equal
# needs: deepspeed
# compare: G, D
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float32)
real = torch.randn(40, 2) + 1
loader = DataLoader(TensorDataset(real), batch_size=8)
G = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
D = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer_g = torch.optim.SGD(G.parameters(), lr=0.05)
optimizer_d = torch.optim.SGD(D.parameters(), lr=0.05)

# %% accelerate --strategy deepspeed
for (batch,) in loader:
    fake = G(torch.randn(len(batch), 3))
    loss_d = nn.functional.softplus(-D(batch)).mean() + nn.functional.softplus(D(fake.detach())).mean()
    for p in D.parameters():
        p.grad = None
    loss_d.backward()
    optimizer_d.step()
    optimizer_g.zero_grad()
    nn.functional.softplus(-D(fake)).mean().backward()
    optimizer_g.step()
