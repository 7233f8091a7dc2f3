# The notebook replaces a method of a layer of torch by one that keeps what it sees, between cells that train.
# outcome: equal
# compare: seen, counts, model
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F

x, y = torch.randn(32, 5), torch.randint(0, 2, (32,))
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
seen, counts = [], []


def step():
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    counts.append(len(seen))


# %% accelerate
step()

# %%
plain_forward = nn.Tanh.forward


def forward_that_keeps(self, values):
    seen.append((len(values), values.mean().item()))
    return plain_forward(self, values)


nn.Tanh.forward = forward_that_keeps

# %% accelerate
step()
step()

# %%
step()

# %% accelerate
step()

# %%
nn.Tanh.forward = plain_forward
