# Any branch.
# outcome: equal
# compare: model, losses
# %%

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(128, 4)
Y = X.sum(1, keepdim=True)
M = torch.zeros(128, dtype=torch.bool)
M[64::4] = True
loader = DataLoader(TensorDataset(X, M, Y), batch_size=32)
criterion = nn.MSELoss()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(4, 8)
        self.o = nn.Linear(8, 1)

    def forward(self, x, m):
        h = torch.tanh(self.f(x))
        if m.any():
            h = h - h[m].mean(0)
        return self.o(h)


model = Net()
optimizer = optim.SGD(model.parameters(), lr=1e-1)

# %% accelerate
losses = []
for epoch in range(2):
    for x, m, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x, m), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(epoch, round(losses[-1], 4))
