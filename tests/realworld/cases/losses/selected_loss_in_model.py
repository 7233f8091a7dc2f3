# A model that returns the mean of a loss over observed entries.
# outcome: equal
# compare: model, loss
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(128, 6, 4)
Y = X.sum(2)
M = torch.rand(128, 6) < torch.rand(128, 1)
loader = DataLoader(TensorDataset(X, Y, M), batch_size=32, shuffle=True)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(4, 16)
        self.o = nn.Linear(16, 1)
    def forward(self, x, y, m):
        p = self.o(torch.tanh(self.f(x))).squeeze(2)
        return F.mse_loss(p[m], y[m])               # observed entries only
model = Net()
optimizer = optim.Adam(model.parameters(), lr=1e-2)


# %% accelerate
for epoch in range(3):
    for x, y, m in loader:
        loss = model(x, y, m)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
