# Batch normalization over features, and a tail of few samples: one for a worker, or none.
# outcome: equal
# compare: model
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(34, 5), torch.randint(0, 3, (34,))
loader = DataLoader(TensorDataset(x, y), batch_size=8)
model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# %% accelerate
for xb, yb in loader:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(xb), yb).backward()
    optimizer.step()
