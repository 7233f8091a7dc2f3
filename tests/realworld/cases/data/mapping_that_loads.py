# A mapping of the notebook that loads its values on demand, of which some cannot be loaded; a cell reads two.
# outcome: equal
# compare: weight, loaded
# %%
from collections.abc import Mapping

import torch
from torch import nn

loaded = []


class Parts(Mapping):
    def __init__(self, number):
        self.number = number

    def __getitem__(self, key):
        if key >= 3:
            raise FileNotFoundError(key)
        loaded.append(key)
        return torch.full((4, 2), float(key))

    def __len__(self):
        return self.number

    def __iter__(self):
        return iter(range(self.number))


torch.manual_seed(0)
parts = Parts(5)
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# %% accelerate
for key in (1, 2):
    model(parts[key]).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()

# %%
weight = model.weight.detach()
