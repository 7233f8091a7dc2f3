# Group, instance and layer normalization: each sample by itself.
# outcome: equal
# compare: model
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(42, 2, 6, 6), torch.randint(0, 3, (42,))
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model = nn.Sequential(
    nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.ReLU(),
    nn.Flatten(), nn.LayerNorm(16), nn.Linear(16, 3),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

# %% accelerate
for epoch in range(2):
    for xb, yb in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(xb), yb).backward()
        optimizer.step()
