# Hidden model.
# outcome: equal
# compare: critic
# %%

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(128, 4)
Y = X.sum(1, keepdim=True)
loader = DataLoader(TensorDataset(X, Y), batch_size=32, shuffle=True)
criterion = nn.MSELoss()
critic = nn.Sequential(nn.Linear(1, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))


class Net(nn.Module):
    """calls a global model in its forward pass"""

    def __init__(self):
        super().__init__()
        self.f = nn.Linear(4, 8)
        self.o = nn.Linear(8, 1)

    def forward(self, x):
        y = self.o(torch.tanh(self.f(x)))
        return y + 0.1 * critic(y)


model = Net()
optimizer = optim.Adam([*model.parameters(), *critic.parameters()], lr=1e-2)

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
