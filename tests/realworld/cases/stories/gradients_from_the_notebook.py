# The backward pass in one cell, the step on the workers: a model with an optimizer, and a tensor that is stepped by hand.
# outcome: equal
# compare: model, optimizer, w, w.grad
# runs: always
# %%
import torch
from torch import nn

model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
x, y = torch.randn(12, 3), torch.randn(12, 1)
w = torch.ones(3, requires_grad=True)
nn.functional.mse_loss(model(x * w), y).backward()

# %% accelerate
optimizer.step()
with torch.no_grad():
    w -= 0.5 * w.grad
optimizer.zero_grad()
(w**3).sum().backward()
