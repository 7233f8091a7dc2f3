# Clip function.
# outcome: equal
# compare: losses, loss, model
# %%

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(128, 4)
Y = X.sum(1, keepdim=True)
loader = DataLoader(TensorDataset(X, Y), batch_size=32, shuffle=True)


class GradClip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return F.hardtanh(g, -0.005, 0.005)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 8)
        self.b = nn.Linear(8, 1)

    def forward(self, x):
        return self.b(GradClip.apply(torch.relu(self.a(x))))


model = Net()
optimizer = optim.SGD(model.parameters(), lr=1e-1)
criterion = nn.MSELoss()

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
