# Class counter.
# outcome: equal
# compare: Net.num_forward
# %%

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(128, 4)
Y = X.sum(1, keepdim=True)
loader = DataLoader(TensorDataset(X, Y), batch_size=32, shuffle=True)
criterion = nn.MSELoss()


class Net(nn.Module):
    num_forward = 0

    def __init__(self):
        super().__init__()
        self.f = nn.Linear(4, 1)

    def forward(self, x):
        Net.num_forward += 1
        return self.f(x)


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
print(Net.num_forward)
