# The same with collocation points from a loader and derivatives inside the loop.
# outcome: equal
# compare: net
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

points = torch.rand(48, 2)
loader = DataLoader(TensorDataset(points), batch_size=12, shuffle=True)
net = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

# %% accelerate
for epoch in range(2):
    for (xy,) in loader:
        xy.requires_grad_(True)
        u = net(xy)
        du = torch.autograd.grad(u.sum(), xy, create_graph=True)[0]
        residual = du[:, 0] + u.squeeze(1) * du[:, 1] - torch.sin(xy[:, 0])
        loss = residual.pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
