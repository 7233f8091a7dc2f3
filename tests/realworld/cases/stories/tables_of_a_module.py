# A tensor or array of an imported module that one side changes in place has the same content on the other.
# outcome: equal
# compare: model, first, second, tables.weights, tables.counts, is_same
# %%
import sys
from pathlib import Path

import torch
from torch import nn, optim

Path("own_tables.py").write_text(
    "import numpy as np\nimport torch\n\nweights = torch.ones(4)\ncounts = np.zeros(3)\n"
)
sys.path.insert(0, "")
sys.modules.pop("own_tables", None)
import own_tables as tables

torch.manual_seed(0)
inputs, targets = torch.randn(12, 4), torch.randn(12, 1)
model = nn.Linear(4, 1)
opt = optim.SGD(model.parameters(), lr=0.05)
before = tables.weights


def train():
    loss = ((model(inputs * tables.weights) - targets) ** 2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()


# %% accelerate
train()
tables.weights.mul_(2)
tables.counts += 1
train()
# %%
first = tables.weights.clone(), tables.counts.copy()
tables.weights.add_(1)
tables.counts[0] = 5
# %% accelerate
train()
second = tables.weights.clone(), tables.counts.copy()
tables.weights[0] = 7
train()
# %%
is_same = tables.weights is before
