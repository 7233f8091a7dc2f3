# A fused optimizer that a loss scaler steps: the scaler reads the signature of its step.
# outcome: equal
# compare: model, optimizer, losses, scaler.get_scale()
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F

x, y = torch.randn(32, 4), torch.randn(32, 1)
model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
losses = []

# %% accelerate
for rows in torch.arange(32).split(8):
    loss = F.mse_loss(model(x[rows]), y[rows])
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
