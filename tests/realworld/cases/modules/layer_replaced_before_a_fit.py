# A prepared model gets other layers, which a new optimizer or a new group trains, without a loader.
# outcome: equal
# compare: net, losses
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F

x, y = torch.randn(24, 4), torch.randint(0, 3, (24,))
net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
losses = []


def fit(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in torch.arange(24).split(8):
        loss = F.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())


# %% accelerate
fit(net)

# %% accelerate
net[2] = nn.Linear(6, 3)
fit(net)

# %%
net[0] = nn.Linear(4, 6)

# %% accelerate
net.append(nn.Linear(3, 3))
fit(net)

# %%
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)


def step(rows):
    loss = F.cross_entropy(net(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    optimizer.step()
    losses.append(loss.item())


# %% accelerate
for stage in range(2):
    net.append(nn.Linear(3, 3))
    optimizer.add_param_group({"params": net[-1].parameters()})
    for rows in torch.arange(24).split(8):
        step(rows)

# %% accelerate
net[1] = nn.Linear(6, 6)
optimizer.add_param_group({"params": net[1].parameters()})
for rows in torch.arange(24).split(8):
    step(rows)
