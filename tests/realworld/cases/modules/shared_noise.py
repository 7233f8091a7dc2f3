# Shared noise.
# outcome: equal
# compare: y, x, losses, optimizer, loss
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


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(4, 32)
        self.o = nn.Linear(32, 1)

    def forward(self, x):
        h = F.relu(self.f(x))
        if self.training:
            h = h * (torch.rand(1, h.size(1)) > 0.2) / 0.8  # the same units dropped for all samples
        return self.o(h)


model = Net()
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
