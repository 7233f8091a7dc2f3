# Iterators over several loaders that have names, which loops read to their end.
# outcome: equal
# compare: weight, count
# %%
import itertools

import torch
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
labeled = DataLoader(torch.randn(16, 2), batch_size=4)
unlabeled = DataLoader(torch.randn(24, 2), batch_size=4)
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
count = 0

# %% accelerate
pairs = zip(labeled, unlabeled)
for first, second in pairs:
    loss = model(first).pow(2).mean() + model(second).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
chained = itertools.chain(labeled, unlabeled)
for batch in chained:
    count += 1

# %%
weight = model.weight.detach()
