# WGAN-GP: critic steps with a gradient penalty (create_graph), the mixing weights drawn in the loop.
# outcome: equal
# compare: G, D
# %%
import torch
import torch.nn as nn
from torch import autograd
from torch.utils.data import DataLoader, TensorDataset

real_data = torch.randn(40, 2) + 1
loader = DataLoader(TensorDataset(real_data), batch_size=8, shuffle=True)
G = nn.Sequential(nn.Linear(2, 12), nn.ReLU(), nn.Linear(12, 2))
D = nn.Sequential(nn.Linear(2, 12), nn.ReLU(), nn.Linear(12, 1))
opt_G = torch.optim.Adam(G.parameters(), lr=1e-2, betas=(0.5, 0.9))
opt_D = torch.optim.Adam(D.parameters(), lr=1e-2, betas=(0.5, 0.9))
n_critic, lambda_gp = 2, 10


def compute_gradient_penalty(D, real, fake):
    alpha = torch.rand(real.size(0), 1)
    interpolates = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    d = D(interpolates)
    gradients = autograd.grad(d, interpolates, torch.ones_like(d), create_graph=True, retain_graph=True)[0]
    return ((gradients.norm(2, dim=1) - 1) ** 2).mean()

# %% accelerate
for epoch in range(2):
    for i, (real,) in enumerate(loader):
        opt_D.zero_grad()
        z = torch.randn(real.shape[0], 2)
        fake = G(z).detach()
        d_loss = -torch.mean(D(real)) + torch.mean(D(fake)) + lambda_gp * compute_gradient_penalty(D, real, fake)
        d_loss.backward()
        opt_D.step()
        if i % n_critic == 0:
            opt_G.zero_grad()
            g_loss = -torch.mean(D(G(torch.randn(real.shape[0], 2))))
            g_loss.backward()
            opt_G.step()
