# Minibatch std.
# outcome: equal
# compare: model, loss, losses
# %%

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(128, 4)
Y = (X[:, 0] > 0).long()
loader = DataLoader(TensorDataset(X, Y), batch_size=32, shuffle=True)
criterion = nn.CrossEntropyLoss()


class D(nn.Module):
    """StyleGAN's minibatch standard deviation, groups of at most 4"""

    def __init__(self):
        super().__init__()
        self.f = nn.Linear(4, 8)
        self.o = nn.Linear(9, 2)

    def forward(self, x):
        h = torch.relu(self.f(x))
        g = min(4, len(h)) if len(h) % 4 == 0 else 1
        y = h.view(g, -1, 8)
        y = (y - y.mean(0)).pow(2).mean(0).add(1e-8).sqrt().mean(1, keepdim=True)
        return self.o(torch.cat([h, y.repeat(g, 1)], 1))


model = D()
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
