# A model whose forward was replaced on the object: copies of it while it trains, and one that a cell makes.
# outcome: equal
# compare: model, other, seen, found
# %%
import copy
import types

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x)


def doubled(self, x):
    return 2 * self.layer(x)


x, y = torch.randn(32, 4), torch.randn(32, 1)
loader = DataLoader(TensorDataset(x, y), batch_size=8)
model = Net()
model.forward = types.MethodType(doubled, model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
seen = []

# %% accelerate
other = Net()
other.forward = types.MethodType(doubled, other)
for net, stepped in ((model, optimizer), (other, torch.optim.SGD(other.parameters(), lr=0.01))):
    for xb, yb in loader:
        stepped.zero_grad()
        F.mse_loss(net(xb), yb).backward()
        stepped.step()
    average = copy.deepcopy(net)
    with torch.no_grad():
        seen.append((average(x).sum().item(), copy.copy(net)(x).sum().item(), net(x).sum().item()))

# %%
found = [net(x).sum().item() for net in (model, other, average)]
