# Gan toggle twice.
# outcome: equal
# compare: D, G
# %%

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(128, 2) * 0.5 + 2
loader = DataLoader(TensorDataset(X), batch_size=32, shuffle=True)
G = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
D = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
opt_G, opt_D = optim.Adam(G.parameters(), lr=1e-3), optim.Adam(D.parameters(), lr=1e-3)


def set_requires_grad(net, flag):
    for p in net.parameters():
        p.requires_grad = flag


def train(epochs):
    for epoch in range(epochs):
        for (x,) in loader:
            fake = G(torch.randn(len(x), 4))
            set_requires_grad(D, False)
            opt_G.zero_grad()
            loss_G = ((D(fake) - 1) ** 2).mean()
            loss_G.backward()
            opt_G.step()
            set_requires_grad(D, True)
            opt_D.zero_grad()
            loss_D = ((D(x) - 1) ** 2).mean() + (D(fake.detach()) ** 2).mean()
            loss_D.backward()
            opt_D.step()
        print(epoch, round(loss_G.item(), 4), round(loss_D.item(), 4))
    set_requires_grad(D, False)


# %% accelerate
train(2)

# %% accelerate
train(2)
