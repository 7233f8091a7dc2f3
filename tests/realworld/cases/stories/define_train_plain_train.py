# Cell 1 defines, cell 2 trains an epoch on workers, a plain cell trains one, the next trains on workers again.
# outcome: equal
# compare: model, optimizer, seen
# runs: always
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

x = torch.randn(45, 6)
y = torch.randint(0, 2, (45,)).double()
loader = DataLoader(TensorDataset(x, y), batch_size=10, shuffle=True)
model = nn.Sequential(nn.Linear(6, 10), nn.ELU(), nn.Linear(10, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
criterion = nn.BCEWithLogitsLoss()
seen = []

# %% accelerate
for xb, yb in loader:
    optimizer.zero_grad()
    criterion(model(xb).squeeze(1), yb).backward()
    optimizer.step()
seen.append("workers")

# %%
for xb, yb in loader:
    optimizer.zero_grad()
    criterion(model(xb).squeeze(1), yb).backward()
    optimizer.step()
seen.append("kernel")

# %% accelerate
for xb, yb in loader:
    optimizer.zero_grad()
    criterion(model(xb).squeeze(1), yb).backward()
    optimizer.step()
seen.append("workers")
