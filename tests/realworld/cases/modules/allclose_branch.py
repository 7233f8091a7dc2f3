# Allclose branch.
# outcome: equal
# compare: model, losses, loss
# %%

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(128, 4)
Y = X.sum(1, keepdim=True)
X[:48, 3] = 0
loader = DataLoader(TensorDataset(X, Y), batch_size=32)
criterion = nn.MSELoss()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(4, 8)
        self.o = nn.Linear(8, 1)

    def forward(self, x):
        h = torch.tanh(self.f(x))
        if not torch.equal(x[:, 3], torch.zeros(len(x))):
            h = 2 * h  # some sample has the extra feature
        return self.o(h)


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
