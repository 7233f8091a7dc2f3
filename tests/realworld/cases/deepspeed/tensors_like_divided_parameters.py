# Tensors made in the shape of parameters that ZeRO stage 3 has divided.
# outcome: equal
# needs: deepspeed
# compare: net, out
# %%
import copy

import torch
import torch.nn as nn
torch.set_default_dtype(torch.float32)
x = torch.randn(12, 3)
net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
opt = torch.optim.Adam(net.parameters(), lr=0.05)
out = []
# %% accelerate --strategy deepspeed --zero-stage 3
fisher = {n: torch.zeros_like(p) for n, p in net.named_parameters()}
ones = {n: torch.ones_like(p, dtype=torch.float64) for n, p in net.named_parameters()}
other = [p.new_zeros(p.shape) for p in net.parameters()]
full = [torch.full_like(p, 3) for p in net.parameters()]
for i in range(6):
    opt.zero_grad()
    loss = (net(x) ** 2).mean()
    loss.backward()
    for n, p in net.named_parameters():
        fisher[n] += p.grad ** 2
    opt.step()
out = [f.sum().item() for f in [*fisher.values(), *ones.values(), *other, *full]]
