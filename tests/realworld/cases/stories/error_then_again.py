# A cell that fails half-way (a typo after the epoch, caught), is mended and run again.
# outcome: equal
# compare: model, notes
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(32, 3), torch.randint(0, 2, (32,))
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
notes = []

# %% accelerate
try:
    for xb, yb in loader:
        loss = nn.functional.cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    notes.append(undefined_name)
except NameError as error:
    notes.append(str(error))

# %% accelerate
for xb, yb in loader:
    loss = nn.functional.cross_entropy(model(xb), yb)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
notes.append("done")
