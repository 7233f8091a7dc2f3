# Own py rng.
# outcome: equal
# compare: optimizer, losses
# %%
import random

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(128, 10)
Y = (X[:, 0] > 0).long()
loader = DataLoader(TensorDataset(X, Y), batch_size=32, shuffle=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(10, 10) for _ in range(3)])
        self.fc2 = nn.Linear(10, 2)
        self.rng = random.Random(0)

    def forward(self, x):
        for layer in self.layers:
            if self.training and self.rng.random() < 0.3:
                continue  # LayerDrop
            x = x + torch.tanh(layer(x))
        return self.fc2(x)


model = Net()
optimizer = optim.Adam(model.parameters(), lr=1e-2)
criterion = nn.CrossEntropyLoss()

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
