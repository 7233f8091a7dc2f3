# An object of a class in a module of the user's, whose methods cells call on both sides.
# outcome: equal
# compare: model, first, second, last
# runs: always

# %%
import sys
from pathlib import Path

import torch
from torch import nn

Path("meters_of_a_case.py").write_text("""
class Meter:
    def __init__(self):
        self.values = []
        self.best = None

    def record(self, value):
        self.values.append(value)
        self.best = min(self.values)


meter = Meter()
alias = meter
""")
sys.path.insert(0, str(Path.cwd()))
sys.modules.pop("meters_of_a_case", None)
import meters_of_a_case as meters

torch.manual_seed(0)
x = torch.randn(16, 3)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
meters.meter.record(9.0)

# %% accelerate
first = len(meters.meter.values)
for _ in range(3):
    loss = (model(x) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    meters.meter.record(loss.item())

# %%
second = [*meters.meter.values, meters.meter.best, meters.alias is meters.meter]
meters.meter.record(-1.0)

# %% accelerate
last = [*meters.alias.values, meters.meter.best]

# %%
del sys.path[0]
