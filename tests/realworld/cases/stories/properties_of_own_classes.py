# A class of the notebook has a cached property, and a property whose setter uses another name of the notebook.
# outcome: equal
# compare: model, plan.total, computed, plan.rate, rates, SCALE
# %%
from functools import cached_property

import torch
from torch import nn

torch.manual_seed(0)
computed, rates, SCALE = [], [], 2.0


class Plan:
    @cached_property
    def total(self):
        computed.append("total")
        return 5

    @property
    def rate(self):
        return rates[-1]

    @rate.setter
    def rate(self, value):
        rates.append(value * SCALE)


model, plan = nn.Linear(4, 2), Plan()
x, y = torch.randn(8, 4), torch.randn(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# %% accelerate
plan.rate = 0.05
for _ in range(plan.total):
    optimizer.zero_grad()
    ((model(x) - y) ** 2).mean().backward()
    optimizer.step()
# %%
plan.rate = 3.0
SCALE = 4.0
# %% accelerate
plan.rate = plan.total
((model(x) - y) ** 2).mean().backward()
optimizer.step()
