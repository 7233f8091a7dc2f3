# Cells that train and then delete the names of what they have trained, as is usual before the next model of a fold.
# outcome: equal
# compare: names, weights, kept, optimizer, loss
# %%
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(32, 6), torch.randn(32, 1)), batch_size=16, shuffle=True)
model = nn.Linear(6, 1)
kept = nn.Sequential(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
unused = [1, 2]

# %% accelerate
for x, y in loader:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
unused.append(3)
del model, loss, unused, x, y

# %%
names = [name for name in ("model", "loss", "unused", "x", "y") if name in globals()]
weights = kept[0].weight.detach().clone()

# %% accelerate
model = kept[0]
for x, y in loader:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(kept(x), y)
    loss.backward()
    optimizer.step()

# %% accelerate
for x, y in loader:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
del model, optimizer

# %%
names += [name for name in ("model", "optimizer") if name in globals()]
optimizer = torch.optim.SGD(kept.parameters(), lr=0.1)

# %% accelerate
for x, y in loader:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(kept(x), y)
    loss.backward()
    optimizer.step()
