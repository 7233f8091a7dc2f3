# Closure counter forward.
# outcome: equal
# compare: optimizer, losses, model
# %%

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(128, 4)
Y = X.sum(1, keepdim=True)
loader = DataLoader(TensorDataset(X, Y), batch_size=32, shuffle=True)
criterion = nn.MSELoss()


def make_counter():
    n = 0

    def count():
        nonlocal n
        n += 1
        return n

    return count


count = make_counter()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(4, 1)

    def forward(self, x):
        return self.f(x) / (1 + 0.1 * count())


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
print(count())
