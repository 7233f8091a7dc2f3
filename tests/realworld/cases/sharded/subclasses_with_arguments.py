# Each subclass must name itself, so PyTorch cannot make the one by which it shards the weights.
# outcome: refused cannot shard a Regression
# compare: model
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

x = torch.randn(24, 4)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)


class Listed(nn.Module):
    kinds = {}

    def __init_subclass__(cls, kind):
        Listed.kinds[kind] = cls


class Regression(Listed, kind="regression"):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 1)

    def forward(self, batch):
        return self.head(batch)


model = Listed.kinds["regression"]()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# %% accelerate --strategy fsdp
for inputs, targets in loader:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
