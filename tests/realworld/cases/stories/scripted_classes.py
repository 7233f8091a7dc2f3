# A module that a cell imports compiles a class whose methods call functions of the module, as torch.distributed.optim.
# outcome: equal
# compare: model, bound
# %%
import importlib
import sys
from pathlib import Path

import torch
import torch.nn as nn

Path("boundaries.py").write_text("""
import torch


@torch.jit.script
def shortened(values: torch.Tensor, largest: float) -> torch.Tensor:
    return values * torch.clamp(largest / values.norm(), max=1.0)


@torch.jit.script
class Boundary:
    def __init__(self, largest: float) -> None:
        self.largest = largest

    def keep(self, values: torch.Tensor) -> torch.Tensor:
        return shortened(values, self.largest)
""")
sys.path.insert(0, "")
sys.modules.pop("boundaries", None)
importlib.invalidate_caches()
x, y = torch.randn(16, 3), torch.randn(16, 1)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

# %% accelerate
from boundaries import Boundary

boundary = Boundary(0.6)
for _ in range(3):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    with torch.no_grad():
        model.weight.copy_(boundary.keep(model.weight))
bound = model.weight.norm().item()
del boundary
