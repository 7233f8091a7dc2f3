# Bn training branch.
# outcome: equal
# compare: model, losses
# %%

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(128, 4) * 2 + 1
Y = (X[:, 0] > 0).long()
loader = DataLoader(TensorDataset(X, Y), batch_size=32, shuffle=True)
criterion = nn.CrossEntropyLoss()


class BatchRenorm(nn.BatchNorm1d):
    """batch renormalization"""

    def forward(self, x):
        if not self.training:
            return super().forward(x)
        m, s = x.mean(0), x.std(0, unbiased=False) + self.eps
        r = (s.detach() / self.running_var.sqrt()).clamp(1 / 3, 3)
        d = ((m.detach() - self.running_mean) / self.running_var.sqrt()).clamp(-5, 5)
        self.running_mean.lerp_(m.detach(), 0.1)
        self.running_var.lerp_(s.detach() ** 2, 0.1)
        return ((x - m) / s * r + d) * self.weight + self.bias


model = nn.Sequential(nn.Linear(4, 8), BatchRenorm(8), nn.ReLU(), nn.Linear(8, 2))
optimizer = optim.SGD(model.parameters(), lr=0.1)

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
