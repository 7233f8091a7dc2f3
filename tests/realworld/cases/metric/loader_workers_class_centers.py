# Class centres that the loop updates, read by worker processes.
# outcome: equal
# compare: model, centers
# %%

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(128, 6)
Y = torch.randint(0, 3, (128,))
loader = DataLoader(TensorDataset(X, Y), batch_size=32, shuffle=True, num_workers=2)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        h = self.f(x)
        return h, self.fc(h)


model = Net()
optimizer = optim.SGD(model.parameters(), lr=0.05)
centers = torch.zeros(3, 4)

# %% accelerate
for epoch in range(3):
    for x, y in loader:
        h, out = model(x)
        loss = F.cross_entropy(out, y) + 0.5 * ((h - centers[y]) ** 2).sum(1).mean()  # center loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for c in range(3):
                if (y == c).any():
                    centers[c] = 0.5 * centers[c] + 0.5 * h[y == c].mean(0)
print("done")
