# Bn alias.
# outcome: equal
# compare: model, losses
# %%

import torch
import torch.nn as nn
import torch.optim as optim
from torch.nn.functional import batch_norm
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(128, 4) * 2 + 1
Y = (X[:, 0] > 0).long()
loader = DataLoader(TensorDataset(X, Y), batch_size=32, shuffle=True)
criterion = nn.CrossEntropyLoss()


class FlexibleBN(nn.BatchNorm1d):
    def forward(self, x):
        return batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps
        )


model = nn.Sequential(nn.Linear(4, 8), FlexibleBN(8), nn.ReLU(), nn.Linear(8, 2))
optimizer = optim.SGD(model.parameters(), lr=0.1)

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
