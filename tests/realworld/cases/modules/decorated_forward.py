# Decorated forward.
# outcome: equal
# compare: n_calls
# %%

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(128, 4)
Y = X.sum(1, keepdim=True)
loader = DataLoader(TensorDataset(X, Y), batch_size=32, shuffle=True)
criterion = nn.MSELoss()
import functools


def counted(f):
    @functools.wraps(f)
    def wrapper(*a, **k):
        wrapper.calls += 1
        return f(*a, **k)

    wrapper.calls = 0
    return wrapper


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(4, 1)

    @counted
    def forward(self, x):
        return self.f(x)


model = Net()
optimizer = optim.SGD(model.parameters(), lr=1e-1)

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
n_calls = Net.forward.calls
print(Net.forward.calls)
