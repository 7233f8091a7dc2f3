# Losses that were appended with their graphs are read on both sides, and a detached output is trained on.
# outcome: equal
# compare: model, head, total, again
# %%
import torch
from torch import nn

model, head = nn.Linear(3, 3), nn.Linear(3, 1)
optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
x, y = torch.randn(12, 3), torch.randn(12, 1)
features = model(x)
losses = [nn.functional.mse_loss(head(features), y)]

# %% accelerate
for _ in range(3):
    loss = nn.functional.mse_loss(head(features.detach()), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss)
total = sum(losses).item()

# %%
again = [value.item() for value in losses], losses[-1].requires_grad
