# The same sums, reconstruction plus KL, without noise: the mean is decoded.
# outcome: equal
# compare: encoder, heads, decoder
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

data = torch.rand(42, 10)
loader = DataLoader(data, batch_size=8, shuffle=True)
encoder = nn.Sequential(nn.Linear(10, 16), nn.ReLU())
heads = nn.ModuleDict({"mu": nn.Linear(16, 2), "logvar": nn.Linear(16, 2)})
decoder = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 10), nn.Sigmoid())
optimizer = torch.optim.SGD([*encoder.parameters(), *heads.parameters(), *decoder.parameters()], lr=0.01)

# %% accelerate
for epoch in range(2):
    for x in loader:
        h = encoder(x)
        mu, logvar = heads["mu"](h), heads["logvar"](h)
        bce = F.binary_cross_entropy(decoder(mu), x, reduction="sum")
        kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        loss = bce + 0.5 * kld
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
