# A cell imports objects of the user's module by their names: they are those of the module afterwards, not copies.
# outcome: equal
# compare: model, found, rate, options.seen

# %%
import sys
from pathlib import Path

import torch
from torch import nn

Path("settings_of_a_case.py").write_text("""
class Options:
    def __init__(self):
        self.rate = 0.1
        self.seen = 0


options = Options()
registry = {"names": []}


def rate():
    return options.rate
""")
sys.path.insert(0, str(Path.cwd()))
sys.modules.pop("settings_of_a_case", None)
model = nn.Linear(3, 1)
x = torch.randn(16, 3)

# %% accelerate
from settings_of_a_case import *

optimizer = torch.optim.SGD(model.parameters(), lr=rate())
for _ in range(3):
    loss = (model(x) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    options.seen += 1

# %%
import settings_of_a_case as module

found = options is module.options, registry is module.registry
options.rate = 0.5
rate = module.rate()
del sys.path[0]
