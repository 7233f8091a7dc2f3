# Affine coupling layers, the negative log likelihood as the loss.
# outcome: equal
# compare: flow
# %%
import math
import torch
import torch.nn as nn
from torch.utils.data import DataLoader


class Coupling(nn.Module):
    def __init__(self, flip):
        super().__init__()
        self.flip = flip
        self.net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x):
        a, b = x.chunk(2, dim=1)
        if self.flip:
            a, b = b, a
        s, t = self.net(a).chunk(2, dim=1)
        s = torch.tanh(s)
        b = b * torch.exp(s) + t
        return torch.cat((b, a) if self.flip else (a, b), dim=1), s.sum(1)


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Coupling(i % 2 == 1) for i in range(3)])

    def log_prob(self, x):
        total = 0
        for layer in self.layers:
            x, log_det = layer(x)
            total = total + log_det
        return (-0.5 * x ** 2 - 0.5 * math.log(2 * math.pi)).sum(1) + total

    def forward(self, x):
        return self.log_prob(x)


data = torch.randn(50, 2) @ torch.tensor([[1.0, 0.8], [0.0, 0.6]])
loader = DataLoader(data, batch_size=8, shuffle=True)
flow = Flow()
optimizer = torch.optim.SGD(flow.parameters(), lr=0.05)

# %% accelerate
for epoch in range(2):
    for x in loader:
        loss = -flow(x).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
