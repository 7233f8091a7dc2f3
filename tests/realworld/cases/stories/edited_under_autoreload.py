# A module beside the notebook is edited between two trainings, under %autoreload.
# outcome: told reloaded on the workers
# compare: model, version, versions
# %%
%load_ext autoreload
%autoreload 2
import importlib
import sys
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

with open("my_layers.py", "w") as f:
    f.write("VERSION = 1\ndef criterion(a, b):\n    return (a - b).abs().mean()\n")
sys.path.insert(0, ".")
sys.dont_write_bytecode = True
sys.modules.pop("my_layers", None)
importlib.invalidate_caches()
import my_layers

x, y = torch.randn(24, 3), torch.randn(24, 1)
loader = DataLoader(TensorDataset(x, y), batch_size=8)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
versions = []

# %% accelerate
for xb, yb in loader:
    optimizer.zero_grad()
    my_layers.criterion(model(xb), yb).backward()
    optimizer.step()
versions.append(my_layers.VERSION)

# %%
with open("my_layers.py", "w") as f:
    f.write("VERSION = 22\ndef criterion(a, b):\n    return ((a - b) ** 2).mean()\n")

# %% accelerate
for xb, yb in loader:
    optimizer.zero_grad()
    my_layers.criterion(model(xb), yb).backward()
    optimizer.step()
versions.append(my_layers.VERSION)

# %%
version = my_layers.VERSION
%autoreload 0
