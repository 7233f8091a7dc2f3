# Cyclegan order.
# outcome: equal
# compare: D, G
# %%

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(128, 2) * 0.5 + 2
loader = DataLoader(TensorDataset(X), batch_size=32, shuffle=True)
G = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
D = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
opt_G, opt_D = optim.Adam(G.parameters(), lr=1e-3), optim.Adam(D.parameters(), lr=1e-3)


def set_requires_grad(net, flag):
    for p in net.parameters():
        p.requires_grad = flag


set_requires_grad(D, False)  # the last cell ended after a step of the generator

# %% accelerate
for epoch in range(2):
    for (x,) in loader:
        fake = G(x)
        set_requires_grad(D, False)
        opt_G.zero_grad()
        lg = ((D(fake) - 1) ** 2).mean()
        lg.backward()
        opt_G.step()
        set_requires_grad(D, True)
        opt_D.zero_grad()
        ld = ((D(x) - 1) ** 2).mean() + (D(fake.detach()) ** 2).mean()
        ld.backward()
        opt_D.step()
    print(epoch, lg.item(), ld.item())
