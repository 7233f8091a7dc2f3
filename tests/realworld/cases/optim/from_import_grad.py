# From import grad.
# outcome: equal
# compare: gs, norms
# %%

import torch
import torch.nn as nn
import torch.optim as optim
from torch.autograd import grad
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(128, 4)
Y = X.sum(1, keepdim=True)
loader = DataLoader(TensorDataset(X, Y), batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = optim.SGD(model.parameters(), lr=1e-2)
criterion = nn.MSELoss()
norms = []

# %% accelerate
for epoch in range(2):
    for x, y in loader:
        loss = criterion(model(x), y)
        gs = grad(loss, list(model.parameters()), create_graph=True)
        gn = sum(g.pow(2).sum() for g in gs).sqrt()
        norms.append(gn.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(epoch, loss.item(), norms[-1])
