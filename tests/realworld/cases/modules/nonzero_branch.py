# Nonzero branch.
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
M[50:] = torch.rand(78) < 0.1
loader = DataLoader(TensorDataset(X, M, Y), batch_size=32)
criterion = nn.MSELoss()


class Net(nn.Module):
    """replaces masked samples by the mean of the masked ones"""

    def __init__(self):
        super().__init__()
        self.f = nn.Linear(4, 8)
        self.o = nn.Linear(8, 1)

    def forward(self, x, m):
        h = torch.tanh(self.f(x))
        idx = m.nonzero().squeeze(1)
        if len(idx) > 0:
            h = h.index_copy(0, idx, h[idx].mean(0, keepdim=True).expand(len(idx), -1))
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
