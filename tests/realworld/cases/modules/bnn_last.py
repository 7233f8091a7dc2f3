# Bnn last.
# outcome: equal
# compare: y, x, losses, optimizer
# %%

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(256, 4)
Y = X.sum(1, keepdim=True)
loader = DataLoader(TensorDataset(X, Y), batch_size=64, shuffle=True)
criterion = nn.MSELoss()


class BayesLinear(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.mu = nn.Parameter(0.1 * torch.randn(o, i))
        self.rho = nn.Parameter(torch.full((o, i), -2.0))
        self.b = nn.Parameter(torch.zeros(o))

    def forward(self, x):
        w = self.mu + F.softplus(self.rho) * torch.randn_like(self.mu) if self.training else self.mu
        return F.linear(x, w, self.b)


model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), BayesLinear(32, 1))
optimizer = optim.Adam(model.parameters(), lr=1e-2)

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
