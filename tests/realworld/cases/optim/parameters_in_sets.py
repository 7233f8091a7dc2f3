# Parameters chosen by differences of sets, whose order is another one in each process.
# outcome: equal
# compare: model, sizes
# %%
import torch
from torch import nn

body = [layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU())]
model = nn.Sequential(*body, nn.Linear(8, 1))
x, y = torch.randn(24, 8), torch.randn(24, 1)

# %% accelerate
head = set(model[-1].parameters())
rest = list(set(model.parameters()) - head)
optimizer = torch.optim.AdamW([{"params": rest, "lr": 1e-3}, {"params": list(head)}], lr=1e-2)
for rows in torch.arange(24).split(8):
    loss = nn.functional.mse_loss(model(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

# %%
optimizer.zero_grad()
nn.functional.mse_loss(model(x), y).backward()
optimizer.step()

# %% accelerate
for rows in torch.arange(24).split(8):
    loss = nn.functional.mse_loss(model(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

# %%
sizes = [len(group["params"]) for group in optimizer.param_groups]
