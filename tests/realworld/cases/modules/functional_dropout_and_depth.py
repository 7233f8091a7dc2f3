# F.dropout with training=self.training and stochastic depth by torch.rand in forward: no module shows it.
# outcome: equal
# compare: model
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.fc = nn.Linear(dim, dim)

    def forward(self, x):
        h = F.dropout(torch.relu(self.fc(x)), p=0.3, training=self.training)
        if self.training:
            keep = (torch.rand(x.shape[0], 1) < 0.8).to(x.dtype)
            h = h * keep / 0.8
        return x + h


x, y = torch.randn(40, 6), torch.randint(0, 3, (40,))
loader = DataLoader(TensorDataset(x, y), batch_size=8)
model = nn.Sequential(Block(6), Block(6), nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# %% accelerate
for epoch in range(2):
    for xb, yb in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(xb), yb).backward()
        optimizer.step()
