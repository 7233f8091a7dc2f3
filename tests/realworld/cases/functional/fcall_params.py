# Fcall params.
# outcome: told every worker trains it alone
# compare: model
# %%

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.func import functional_call

X = torch.randn(64, 4)
Y = X.sum(1, keepdim=True)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = optim.SGD(model.parameters(), lr=0.05)

# %% accelerate
for it in range(4):
    fast = {n: nn.Parameter(p.detach().clone()) for n, p in model.named_parameters()}
    inner = optim.SGD(fast.values(), lr=0.1)
    for _ in range(2):  # adapt a copy (first-order MAML)
        inner.zero_grad()
        F.mse_loss(functional_call(model, fast, (X[:32],)), Y[:32]).backward()
        inner.step()
    outer = F.mse_loss(functional_call(model, fast, (X[32:],)), Y[32:])
    inner.zero_grad()
    outer.backward()
    optimizer.zero_grad()
    for n, p in model.named_parameters():
        p.grad = fast[n].grad.clone()
    optimizer.step()
    print(it, round(outer.item(), 5))
