# Weights in a list or by keyword, which ZeRO stage 3 holds in parts.
# outcome: refused the code computes with a parameter outside of the model's forward pass
# needs: deepspeed
# compare: net
# runs: always
# %%
import torch
import torch.nn as nn

torch.set_default_dtype(torch.float32)
x = torch.randn(12, 3)
net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4))
opt = torch.optim.Adam(net.parameters(), lr=0.05)

# %% accelerate --strategy deepspeed --zero-stage 3
for i in range(3):
    opt.zero_grad()
    (net(x) ** 2).mean().backward()
    print(net[2].weight.size(dim=0), torch.zeros_like(input=net[2].bias).shape)
    stacked = torch.stack([net[0].bias, net[2].bias])
    opt.step()
