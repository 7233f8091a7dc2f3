# Layers replaced and rescaled in plain cells between training cells; learning rate set by hand.
# outcome: equal
# compare: model, accuracy
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(40, 5), torch.randint(0, 3, (40,))
loader = DataLoader(TensorDataset(x, y), batch_size=8)
model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def run_epoch():
    for xb, yb in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(xb), yb).backward()
        optimizer.step()

# %% accelerate
run_epoch()

# %%
with torch.no_grad():
    model[0].weight.mul_(0.5)
for group in optimizer.param_groups:
    group["lr"] = 0.01

# %% accelerate
run_epoch()

# %%
model[2] = nn.Linear(8, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)

# %% accelerate
run_epoch()
accuracy = (model(x).argmax(1) == y).double().mean().item()
