# Wgan mone.
# outcome: equal
# compare: D, G, fake
# %%

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(128, 2) * 0.5 + 2
loader = DataLoader(TensorDataset(X), batch_size=32, shuffle=True)
G = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
D = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
opt_G, opt_D = optim.RMSprop(G.parameters(), lr=1e-3), optim.RMSprop(D.parameters(), lr=1e-3)
one = torch.tensor(1.0)
mone = one * -1

# %% accelerate
for epoch in range(3):
    for (x,) in loader:
        for p in D.parameters():
            p.requires_grad = True
        for p in D.parameters():
            p.data.clamp_(-0.1, 0.1)
        D.zero_grad()
        err_real = D(x).mean()
        err_real.backward(mone)
        fake = G(torch.randn(len(x), 4))
        err_fake = D(fake.detach()).mean()
        err_fake.backward(one)
        opt_D.step()
        for p in D.parameters():
            p.requires_grad = False
        G.zero_grad()
        err_G = D(G(torch.randn(len(x), 4))).mean()
        err_G.backward(mone)
        opt_G.step()
    print(epoch, round(err_real.item(), 4), round(err_G.item(), 4))
