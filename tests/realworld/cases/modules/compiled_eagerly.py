# torch.compile around the model (with the eager backend, which needs no compiler).
# outcome: equal
# compare: model
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(32, 6), torch.randint(0, 2, (32,))
loader = DataLoader(TensorDataset(x, y), batch_size=8)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
compiled = torch.compile(model, backend="eager")
optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)

# %% accelerate
for xb, yb in loader:
    optimizer.zero_grad()
    nn.functional.cross_entropy(compiled(xb), yb).backward()
    optimizer.step()
