# Grad norm function.
# outcome: equal
# compare: losses, loss, model
# %%

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(128, 4)
Y = X.sum(1, keepdim=True)
loader = DataLoader(TensorDataset(X, Y), batch_size=32, shuffle=True)


class NormalizeGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return g / (g.norm() + 1e-8)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 8)
        self.b = nn.Linear(8, 1)

    def forward(self, x):
        return self.b(NormalizeGrad.apply(torch.relu(self.a(x))))


model = Net()
optimizer = optim.SGD(model.parameters(), lr=1e-2)
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
