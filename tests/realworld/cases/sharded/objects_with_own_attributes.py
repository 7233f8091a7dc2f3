# An object whose missing attributes raise KeyError, in cells after one that has sharded a model.
# outcome: equal
# compare: model, total, again.values["x"]

# %%
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Bag:
    def __init__(self):
        self.__dict__["values"] = {}

    def __getattr__(self, name):
        return self.__dict__["values"][name]


bag = Bag()
bag.values["x"] = 1
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(32, 4), torch.randn(32, 1)), batch_size=8, shuffle=True)
total = 0

# %% accelerate --strategy fsdp
for inputs, targets in loader:
    optimizer.zero_grad()
    F.mse_loss(model(inputs), targets).backward()
    optimizer.step()
    total += bag.x

# %% accelerate
total += bag.x
again = bag
